// The page: what a visitor presses, and what the page says.

const find = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const PACES = [10, 100, 1000, 10000, Infinity]; // samples a second
const BUSY = 10; // milliseconds of a frame that may go into steps
const PLAY = "M4 2.5v11l9-5.5z", PAUSE = "M3.5 2.5h3.2v11H3.5zM9.3 2.5h3.2v11H9.3z";

class Page {
  constructor(record, net, train, held) {
    Object.assign(this, { record, net, held, playing: false, due: 0, target: Infinity, evaluated: 0, cost: 0 });
    this.trainer = new Trainer(net, train, held, record.lr);
    this.names = record.classes.slice();
    this.chart = new Chart(find("chart"));
    const kinds = { draw: Sketch, table: Sliders, picture: Viewer, series: Viewer };
    write(record, net, train, held);
    this.labels();
    this.input = new kinds[record.kind](find("input"), record, () => this.predict());
    this.listen();
    this.pace();
    this.rate();
    if (record.kind === "picture" || record.kind === "series") this.showHeldOut();
    this.evaluate();
    this.predict();
  }

  listen() {
    find("play").onclick = () => { this.play(!this.playing); if (!this.playing) this.evaluate(); };
    find("step").onclick = () => { this.play(false); this.trainer.steps(1); this.evaluate(); this.predict(); };
    find("epoch").onclick = () => this.play(true, this.trainer.learned + this.trainer.train.count);
    find("reset").onclick = () => this.reset();
    find("once").onclick = () => this.learnOnce();
    find("pace").oninput = () => this.pace();
    find("rate").oninput = () => this.rate();
    find("sample").onclick = () => this.showHeldOut();
    find("new-form").onsubmit = (event) => { event.preventDefault(); this.addClass(find("new-name").value.trim()); };
    find("download").onclick = () => this.download();
    find("load").onclick = () => find("file").click();
    find("file").onchange = async (event) => { await this.load(event.target.files[0]); event.target.value = ""; };
    const repaint = () => { this.input.paint(); this.chart.paint(); this.units(); this.gallery(); };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
    addEventListener("resize", () => this.units());
  }

  // ---- training ----

  play(playing, target = Infinity) {
    Object.assign(this, { playing, target, due: 0, before: performance.now() });
    find("play-icon").setAttribute("d", playing ? PAUSE : PLAY);
    find("play-text").textContent = playing ? "Pause" : "Train";
    if (playing && !this.waiting) this.waiting = requestAnimationFrame(() => this.frame());
  }

  // As many steps as the pace asks for and a frame has time for.
  frame() {
    this.waiting = 0;
    if (!this.playing) return;
    const now = performance.now(), elapsed = Math.min(100, now - this.before) / 1000;
    this.before = now;
    const pace = this.target < Infinity ? Math.max(this.steps, this.trainer.train.count) : this.steps;
    this.due = Math.min(this.due + pace * elapsed, 1e6);
    while (this.due >= 1 && this.left() && performance.now() - now < BUSY && !this.trainer.refused) {
      const n = Math.min(Math.floor(this.due), this.left(), 64);
      this.trainer.steps(n);
      this.due -= n;
    }
    if (!this.left() || this.trainer.refused) this.play(false);
    if (!this.playing || now - this.evaluated > Math.max(60, 5 * this.cost)) this.evaluate();
    this.predict();
    if (this.playing) this.waiting = requestAnimationFrame(() => this.frame());
  }

  // The one-pass head learns from every built-in sample that it has not seen; the net does not.
  learnOnce() {
    this.play(false);
    const { trainer } = this, before = trainer.onePass.samples, start = performance.now();
    trainer.once(Array.from({ length: trainer.train.count }, (_, i) => i));
    const learned = trainer.onePass.samples - before, seconds = (performance.now() - start) / 1000;
    this.evaluate();
    this.predict();
    this.say("once-status", learned
      ? `${count(learned)} samples in ${seconds.toFixed(2)} seconds, each once.` : "It has seen all of them: there is nothing to repeat.");
  }

  left() { return this.target - this.trainer.learned; }

  // Held-out accuracy, the facts and the hidden units, as they are now.
  evaluate() {
    const start = performance.now(), [net, control] = this.trainer.accuracies(), head = this.trainer.onePass.accuracy(this.held);
    this.evaluated = performance.now();
    this.cost = this.evaluated - start;
    this.chart.add(this.trainer.learned, net, control, head);
    find("accuracy").textContent = percent(net);
    if (control !== null) find("control-accuracy").textContent = percent(control);
    find("head-accuracy").textContent = head === null ? "–" : percent(head);
    find("head-samples").textContent = count(this.trainer.onePass.samples);
    find("chart").setAttribute("aria-label", `Held-out accuracy after ${count(this.trainer.learned)} samples: ` +
      `${percent(net)}${control === null ? "" : `; control ${percent(control)}`}`);
    const { seconds, timed } = this.trainer;
    if (seconds > 0 && timed > 200) find("fact-time").textContent = (1e6 * seconds / timed).toFixed(seconds / timed < 1e-4 ? 1 : 0);
    this.accuracy = net;
    this.units();
    this.gallery();
    if (this.trainer.refused) this.say("taught", "The step was refused: with this learning rate the weights grow without bound. Choose a smaller one and press Reset.");
    this.trainer.refused = 0;
  }

  pace() {
    this.steps = PACES[find("pace").value];
    find("pace-text").textContent = this.steps === Infinity ? "no limit" : `${count(this.steps)} samples/s`;
  }

  rate() {
    this.trainer.rate = this.record.lr * 10 ** (find("rate").value / 20);
    find("rate-text").textContent = Number(this.trainer.rate.toPrecision(2)).toString();
  }

  reset() {
    this.play(false);
    this.trainer.reset();
    this.names = this.record.classes.slice();
    this.chart.clear();
    find("fact-time").textContent = "–";
    for (const id of ["taught", "new-status", "keep-status", "once-status"]) this.say(id, "");
    this.labels();
    this.places();
    this.evaluate();
    this.predict();
  }

  // ---- one sample ----

  predict() {
    const sample = this.input && this.input.sample(), chances = sample ? this.net.probabilities(sample) : this.names.map(() => 0);
    const best = chances.indexOf(Math.max(...chances)), bars = find("bars").children;
    for (let c = 0; c < bars.length; c++) {
      bars[c].className = sample && c === best ? "best" : "";
      bars[c].style.setProperty("--share", chances[c]);
      bars[c].lastElementChild.textContent = sample ? `${Math.round(100 * chances[c])} %` : "";
    }
    find("says").innerHTML = sample ? "The net says <b></b>" : "The net says …";
    if (sample) find("says").querySelector("b").textContent = this.names[best];
    const head = sample ? this.trainer.onePass.predict(sample) : null;
    find("head-says").textContent = head === null ? "" : `One pass: ${this.names[head]}`;
    for (const chip of find("labels").children) chip.disabled = !sample || this.input.heldOut;
  }

  labels() {
    find("labels").classList.toggle("short", this.record.classes.every((name) => name.length <= 2));
    find("labels").replaceChildren(...this.names.map((name, label) => {
      const chip = Object.assign(document.createElement("button"), { type: "button", className: "chip", textContent: name });
      if (label >= this.record.classes.length) chip.classList.add("own");
      chip.onclick = () => this.teach(label);
      return chip;
    }));
    const longest = Math.max(...this.names.map((name) => name.length));
    find("bars").style.setProperty("--names", `${longest + 0.5}ch`);
    find("bars").classList.toggle("long", longest > 5);
    find("bars").replaceChildren(...this.names.map((name) => {
      const row = document.createElement("li");
      row.innerHTML = `<span class="name"></span><span class="track"><span class="fill"></span></span><span class="chance"></span>`;
      row.firstElementChild.textContent = name;
      return row;
    }));
  }

  // Learn from what is on the sheet, a round in each frame.
  teach(label) {
    const sample = this.input.sample(), before = this.accuracy;
    if (!sample || this.input.heldOut || this.teaching) return;
    this.play(false);
    const rounds = this.trainer.teach(sample, label, find("rehearse").checked);
    let last = 0;
    this.teaching = true;
    const go = () => {
      const { value, done } = rounds.next();
      this.predict();
      if (!done) {
        last = value;
        return requestAnimationFrame(go);
      }
      this.teaching = false;
      this.evaluate();
      const right = this.net.predict(LEARNER, sample) === label;
      this.say("taught", `${right ? "Learned" : "Not there yet:"} “${this.names[label]}” in ${last} round${last === 1 ? "" : "s"}. ` +
        `Held-out accuracy ${percent(before)} → ${percent(this.accuracy)}. ${this.headSays(sample, label)}`);
    };
    go();
  }

  headSays(sample, label) {
    const right = this.trainer.onePass.predict(sample) === label;
    return `The one-pass head has seen it once, and ${right ? "knows it" : "does not know it yet"}.`;
  }

  showHeldOut() {
    const i = Math.floor(Math.random() * this.held.count);
    this.input.show(this.held.at(i));
    this.say("taught", `A held-out sample of “${this.names[this.held.labels[i]]}”: the net never learns from it.`);
  }

  // ---- classes of the visitor ----

  addClass(name) {
    if (!name || this.net.classes >= this.net.capacity) return;
    if (this.names.includes(name)) return this.say("new-status", `There is a class “${name}” already.`);
    this.net.addClass();
    this.trainer.onePass.follow(this.net.classes);
    this.names.push(name);
    this.labels();
    this.predict();
    this.chart.mark(this.trainer.learned, `+ ${name}`);
    find("new-name").value = "";
    this.places();
    const act = this.record.kind === "draw" ? "Draw it above" : "Set a sample above";
    this.say("new-status", `“${name}” is a class now. ${act} and press its name, a few times.`);
  }

  places() {
    const left = this.net.capacity - this.net.classes;
    find("new-form").querySelectorAll("input, button").forEach((field) => { field.disabled = !left; });
    find("new-places").textContent = left ? `${left} place${left === 1 ? " is" : "s are"} left.` : "All places are taken.";
  }

  // The visitor's drawings, and whether the net recognises them now.
  gallery() {
    const { own } = this.trainer;
    find("own").hidden = !own.length || this.record.kind !== "draw";
    if (find("own").hidden) return;
    const right = own.map((o) => this.net.predict(LEARNER, o.numbers) === o.label);
    const once = own.filter((o) => this.trainer.onePass.predict(o.numbers) === o.label).length;
    find("own-title").textContent = `Your drawings: ${right.filter(Boolean).length} of ${own.length} recognised`;
    find("own-once").textContent = `The one-pass head, which saw each of them once and rehearsed nothing: ${once} of ${own.length}.`;
    find("gallery").replaceChildren(...own.map(({ numbers, label }, i) => {
      const item = document.createElement("li"), canvas = document.createElement("canvas");
      [canvas.height, canvas.width] = this.record.shape.slice(-2);
      item.className = right[i] ? "right" : "wrong";
      item.append(canvas, `${this.names[label]} ${right[i] ? "✓" : "✗"}`);
      picture(canvas.getContext("2d"), numbers, this.record, getComputedStyle(find("gallery")).color);
      return item;
    }));
  }

  units() {
    const { hidden } = this.record;
    if (hidden) paintUnits(find("units"), this.net.changes(hidden.units * hidden.rows * hidden.columns), hidden);
  }

  // ---- weights ----

  download() {
    const link = document.createElement("a"), bytes = this.net.save();
    link.href = URL.createObjectURL(new Blob([bytes]));
    link.download = `${this.record.name}-weights.bin`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    this.say("keep-status", `${link.download}: ${count(bytes.length)} bytes.`);
  }

  async load(file) {
    if (!file) return;
    this.play(false);
    const bytes = new Uint8Array(await file.arrayBuffer());
    if (!this.net.load(bytes)) return this.say("keep-status", `${file.name} holds no weights of this net, or is damaged. Nothing was changed.`);
    while (this.names.length < this.net.classes) this.names.push(`new ${this.names.length - this.record.classes.length + 1}`);
    this.names.length = this.net.classes;
    Object.assign(this.trainer, { own: [], order: [] });
    this.trainer.onePass.begin();
    this.trainer.onePass.follow(this.net.classes);
    this.labels();
    this.places();
    this.chart.mark(this.trainer.learned, "loaded");
    this.evaluate();
    this.predict();
    this.say("keep-status", `The weights of ${file.name} are in the net.`);
  }

  say(id, text) { find(id).textContent = text; }
}

const HOW = {
  readout: "Every hidden layer has a small classifier of its own, with fixed random weights, and learns to make that classifier right.",
  "readout-learned": "Every hidden layer has a small classifier of its own, and both learn to make that classifier right.",
  "tpsgd-l2": "Every class has a fixed random code in each hidden layer, and the layer learns to come close to the code of the sample’s class.",
  "tpsgd-l1": "Every class has a fixed random code in each hidden layer, and the layer learns to come close to the code of the sample’s class.",
  drtp: "The label, through fixed random weights, tells every hidden layer which way to go.",
  frozen: "The hidden layers stay random; only the last layer learns.",
};

// The sentences of the page that depend on the net and the data.
function write(record, net, train, held) {
  const { ram } = net, bytes = ram.weights + ram.state + ram.arena, draws = record.kind === "draw";
  const text = {
    kicker: `${record.name} · ${record.layers.join(" → ")} · ${record.rule}`,
    lede: (draws
      ? `A small neural network, and a sheet to draw on. Draw a ${record.noun} and it guesses; say what it is and it learns from your drawing, right here. `
      : record.kind === "table"
        ? "A small neural network, and a table to learn from. Set a sample and it guesses; say what it is and it learns from it, right here. "
        : "A small neural network, and data to learn from. Press Train and watch it learn, right here. ") +
      "It learns without backpropagation, and the program inside is the C that trains on a microcontroller.",
    "fact-weights": count(net.c.params()),
    "fact-ram": count(bytes),
    "try-title": draws ? `Draw a ${record.noun}` : "Try a sample",
    "teach-title": draws ? "What did you draw? Press it, and the net learns." : "What is it? Press it, and the net learns.",
    "train-title": `Train on ${count(train.count)} ${draws ? record.noun : "sample"}s`,
    "chart-note": `Accuracy on ${count(held.count)} held-out samples, which the net never learns from. ` + (record.head
      ? "The control starts with the same weights and sees the same samples at the same learning rate, but only its last layer learns. Give it larger rates and more epochs, too, before you compare." : ""),
    "once-note": `A second learner: ${record.onePass} random features of the sample, and least squares that are solved again after each of them. It learns from every sample once, while the net trains or at the press of a button; it has no learning rate, and rehearses nothing. ${FEW} ${draws ? "drawings" : "samples"} of a new class count as much as a built-in class. It takes ${count(net.c.head_ram())} bytes of RAM.`,
    "units-note": record.hidden ? `Each square is a hidden unit, and shows how learning has changed its weights: blue pixels excite it more than before, orange ones less. The squares are empty at first${record.head ? ", and those of the control stay empty" : ""}.` : "",
    ram: `${count(bytes)} bytes`,
    "ram-text": "of RAM are all that training takes.",
    "memory-note": "Fixed at compile time: no malloc, no library; only the sample itself and a little stack come on top. " +
      (record.head ? "The page holds these bytes twice, because of the control. " : "") +
      `The program is ${count(record.wasmBytes)} bytes of WebAssembly, starting weights included.`,
    how: `${HOW[record.rule] || "Every hidden layer has a loss of its own."} So a layer learns as soon as a sample has passed through it: no error travels back through the net, and nothing has to be stored for a backward pass.`,
  };
  for (const [id, words] of Object.entries(text)) find(id).textContent = words;
  find("new-hint").innerHTML = (draws
    ? "Give it a name, draw it, press the name; three to five drawings will do. " : "Give it a name, set a sample, press the name; a few samples will do. ") +
    `The other classes stay, because the net rehearses them. <span id="new-places"></span>`;
  find("where").innerHTML = `Everything happens in this file: the program, the samples and what you add never leave your device. It was written by <code>tpsgd.export.page(model, data, "learns.html", rule=…)</code>.`;
  find("control-score").hidden = !record.head;
  find("hidden-card").hidden = !record.hidden;
  const teaches = draws || record.kind === "table"; // else a visitor has only held-out samples
  find("teach").hidden = !teaches;
  find("new").hidden = !record.spare || !teaches;
  parts(ram, bytes, record);
}

// RAM by part, on a bar as long as the next power of two.
function parts(ram, bytes, record) {
  const whole = 2 ** Math.ceil(Math.log2(bytes)), optimizer = record.optimizer === "sgd" ? "Counters" : "Optimizer and counters";
  const rows = [
    ["weights", "Weights", ram.weights, "float32"],
    ["state", optimizer, ram.state, ""],
    ["arena", "Arena", ram.arena, "activations and errors of one step"],
  ];
  find("stack").replaceChildren(...rows.map(([key, , size]) => {
    const piece = document.createElement("span");
    piece.className = key;
    piece.style.width = `${100 * size / whole}%`;
    return piece;
  }));
  find("stack").dataset.whole = whole >= 1024 ? `${count(whole / 1024)} KB` : `${whole} bytes`;
  find("parts").innerHTML = rows.map(([key, name, size, note]) =>
    `<div><dt><span class="key ${key}"></span>${name}${note && ` <small>${note}</small>`}</dt><dd>${count(size)}</dd></div>`).join("");
}

async function open() {
  const record = JSON.parse(find("record").textContent), { samples } = record;
  const sets = [Samples.open(samples.train, samples), Samples.open(samples.held, samples)];
  const page = new Page(record, await Net.open(record), ...(await Promise.all(sets)));
  page.places();
  return page;
}

window.opened = open().catch((error) => {
  find("failure").textContent = `This browser cannot run the net (${error.message}). One from 2023 or later can.`;
  find("failure").hidden = false;
  throw error;
});
