// Samples that cannot be drawn: a table of features with a slider for each, or a picture or a curve.

class Sliders {
  constructor(place, record, changed) {
    Object.assign(this, { record, changed, heldOut: false });
    const { columns, samples } = record;
    place.innerHTML = `<ul class="sliders">${columns.map((_, i) => `
      <li><label for="feature-${i}"></label><output id="number-${i}"></output>
        <input type="range" id="feature-${i}" min="0" max="255" step="1" value="128"></li>`).join("")}</ul>
      <div class="controls"><button type="button" id="sample">Example</button></div>`;
    this.inputs = columns.map((_, i) => place.querySelector(`#feature-${i}`));
    this.outputs = columns.map((_, i) => place.querySelector(`#number-${i}`));
    place.querySelectorAll("label").forEach((label, i) => { label.textContent = columns[i]; });
    this.number = (i) => samples.low[i] + this.inputs[i].value * samples.width[i] / 255;
    this.inputs.forEach((input, i) => { input.disabled = !samples.width[i]; }); // a constant stays as it is
    this.inputs.forEach((input) => { input.oninput = () => { this.heldOut = false; this.update(); }; });
    this.update();
  }

  show(sample) {
    const { low, width } = this.record.samples;
    this.heldOut = true;
    this.inputs.forEach((input, i) => { input.value = Math.round(255 * (sample[i] - low[i]) / (width[i] || 1)); });
    this.update();
  }

  update() {
    const { shift, scale } = this.record, of = (list, i) => list[list.length > 1 ? i : 0];
    this.outputs.forEach((output, i) => {
      const measured = this.number(i) * of(scale, i) + of(shift, i);
      output.textContent = measured.toLocaleString("en", { maximumSignificantDigits: 3 });
    });
    this.changed();
  }

  sample() {
    return Float32Array.from(this.inputs, (_, i) => this.number(i));
  }

  paint() {}
}

class Viewer {
  constructor(place, record, changed) {
    Object.assign(this, { record, changed, shown: null, heldOut: true });
    place.innerHTML = `<div class="sheet"><canvas id="sheet" role="img" aria-label="A sample"></canvas></div>
      <div class="controls"><button type="button" id="sample">Another example</button></div>`;
    this.sheet = place.querySelector("#sheet");
    if (record.kind === "picture") {
      [this.sheet.height, this.sheet.width] = record.shape.slice(-2);
      this.sheet.classList.add("pixels");
    } else {
      [this.sheet.width, this.sheet.height] = [800, 400];
    }
  }

  show(sample) {
    this.shown = sample.slice();
    this.paint();
    this.changed();
  }

  sample() { return this.shown; }

  paint() {
    if (!this.shown) return;
    const pen = this.sheet.getContext("2d"), { width, height } = this.sheet, colour = getComputedStyle(this.sheet).color;
    pen.clearRect(0, 0, width, height);
    if (this.record.kind === "picture") return picture(pen, this.shown, this.record, colour);
    const numbers = Array.from(this.shown), low = Math.min(...numbers), range = Math.max(...numbers) - low || 1;
    lines(pen, [numbers.map((v, i) => [
      20 + (width - 40) * i / Math.max(1, numbers.length - 1), height - 24 - (height - 48) * (v - low) / range,
    ])], 5, colour);
  }
}
