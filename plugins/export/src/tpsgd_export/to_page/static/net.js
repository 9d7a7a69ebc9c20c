// The net: the functions of net.c as WebAssembly, and the samples that came with it.

const LEARNER = 0, CONTROL = 1; // the two states in memory

class Net {
  constructor(program, record) {
    this.c = program;
    this.record = record;
    const memory = program.memory.buffer;
    this.input = new Float32Array(memory, program.input_at(), record.shape.reduce((a, b) => a * b));
    this.logits = new Float32Array(memory, program.logits_at(), program.capacity());
    this.saved = new Uint8Array(memory, program.record_at(), program.record_bytes());
    this.begin();
    this.first = this.weights.slice();
  }

  static async open(record) {
    const { instance } = await WebAssembly.instantiate(bytesOf(record.wasm), {});
    return new Net(instance.exports, record);
  }

  // Back to the weights that the model came with.
  begin() {
    for (const which of [LEARNER, CONTROL]) this.c.begin(which);
  }

  get classes() { return this.c.classes(LEARNER); }
  get capacity() { return this.c.capacity(); }
  get weights() { return new Float32Array(this.c.memory.buffer, this.c.weights_at(LEARNER), this.c.params()); }

  // How far the first n weights are from those that the model came with.
  changes(n) { return this.weights.slice(0, n).map((w, i) => w - this.first[i]); }

  // One step on one sample; returns 0, or the number of an error. After 4, an output that
  // left the range of numbers, blocks before it have learned; after others no weight has moved.
  step(which, sample, label, rate) {
    this.input.set(sample);
    return this.c.step(which, label, rate, which === LEARNER ? this.record.mask : this.record.head);
  }

  forward(which, sample) {
    this.input.set(sample);
    this.c.forward(which);
    return this.logits;
  }

  // The class with the largest logit.
  predict(which, sample) {
    const logits = this.forward(which, sample);
    let best = 0;
    for (let c = 1; c < this.classes; c++) if (logits[c] > logits[best]) best = c;
    return best;
  }

  // The logits as numbers from 0 to 1, as the loss of the last layer reads them.
  probabilities(sample) {
    const logits = Array.from(this.forward(LEARNER, sample).subarray(0, this.classes));
    if (this.record.loss === "mse") return logits.map((z) => Math.min(1, Math.max(0, z)));
    if (this.record.loss === "bce") return logits.map((z) => 1 / (1 + Math.exp(-z)));
    const top = Math.max(...logits), powers = logits.map((z) => Math.exp(z - top));
    const sum = powers.reduce((a, b) => a + b);
    return powers.map((p) => p / sum);
  }

  accuracy(which, samples) {
    let right = 0;
    for (let i = 0; i < samples.count; i++) right += this.predict(which, samples.at(i)) === samples.labels[i];
    return right / samples.count;
  }

  addClass() {
    for (const which of [LEARNER, CONTROL]) this.c.add_class(which);
  }

  save() {
    this.c.save(LEARNER);
    return this.saved.slice();
  }

  // Weights from a record; returns whether it is a record of this net. The control starts anew.
  load(bytes) {
    if (bytes.length !== this.saved.length) return false;
    this.saved.set(bytes);
    if (this.c.load(LEARNER) !== 0) return false;
    this.c.begin(CONTROL);
    while (this.c.classes(CONTROL) < this.classes) this.c.add_class(CONTROL);
    return true;
  }

  // Bytes of RAM that the C needs on a device, by what they hold.
  get ram() {
    const weights = 4 * this.c.params();
    return { weights, state: this.c.state_bytes() - weights, arena: this.c.arena_bytes() };
  }
}

// Samples that came as bytes, decoded into float32 numbers.
class Samples {
  constructor(pixels, labels, { low, width, levels }) {
    const size = pixels.length / labels.length, one = low.length === 1;
    Object.assign(this, { labels, size, count: labels.length, numbers: new Float32Array(pixels.length) });
    for (let i = 0; i < pixels.length; i++) {
      const feature = one ? 0 : i % size;
      this.numbers[i] = low[feature] + pixels[i] * width[feature] / levels;
    }
  }

  static async open(set, scale) {
    const labels = await inflated(set.y);
    return new Samples(await inflated(set.x), new Uint16Array(labels.buffer), scale);
  }

  at(i) { return this.numbers.subarray(i * this.size, (i + 1) * this.size); }
}

function bytesOf(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

async function inflated(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
