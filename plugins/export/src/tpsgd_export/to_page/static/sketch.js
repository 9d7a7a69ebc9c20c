// A sheet to draw on. Strokes are kept as lines, moved and scaled to the frame that the signs of the
// data have, and painted with the stroke width of the data: that is what the net sees.

const FINE = 12; // sub-pixels per pixel of a sample, in each direction
const STRETCH = 1.35; // how much higher than wide a drawing may become to fill its frame
const THINNEST = 0.7, THICKEST = 2.2; // strokes, over their usual width

class Sketch {
  constructor(place, record, changed) {
    Object.assign(this, { record, changed, strokes: [], shown: null });
    [this.rows, this.columns] = record.shape.slice(-2);
    place.innerHTML = `
      <div class="sheet"><canvas id="sheet" aria-label="Sheet to draw on" role="img"></canvas>
        <p class="placeholder" id="placeholder">Draw here<small>with a finger or the mouse</small></p></div>
      <div class="controls"><button type="button" id="clear">Clear</button><button type="button" id="sample">Example</button></div>`;
    find("seen-place").innerHTML = `<figure class="seen"><canvas id="seen" width="${this.columns}" height="${this.rows}"
      role="img" aria-label="What the net sees"></canvas><figcaption>what it sees</figcaption></figure>`;
    this.sheet = place.querySelector("#sheet");
    this.seen = find("seen");
    this.placeholder = place.querySelector("#placeholder");
    this.sheet.width = this.sheet.height = 560;
    this.fine = document.createElement("canvas");
    this.fine.width = this.columns * FINE;
    this.fine.height = this.rows * FINE;
    this.sheet.style.aspectRatio = `${this.columns} / ${this.rows}`;
    place.querySelector("#clear").onclick = () => this.clear();
    this.listen();
    this.paint();
  }

  listen() {
    let stroke = null;
    const point = (event) => {
      const box = this.sheet.getBoundingClientRect();
      return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    };
    this.sheet.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      this.sheet.setPointerCapture(event.pointerId);
      if (this.shown) this.clear();
      stroke = [point(event)];
      this.strokes.push(stroke);
      this.update();
    });
    this.sheet.addEventListener("pointermove", (event) => {
      if (!stroke) return;
      const events = event.getCoalescedEvents ? event.getCoalescedEvents() : [event];
      for (const each of events.length ? events : [event]) stroke.push(point(each));
      this.update();
    });
    for (const end of ["pointerup", "pointercancel"]) this.sheet.addEventListener(end, () => { stroke = null; });
  }

  get heldOut() { return this.shown !== null; }

  clear() {
    this.strokes = [];
    this.shown = null;
    this.update();
  }

  // A held-out sample of the data in place of a drawing.
  show(sample) {
    this.strokes = [];
    this.shown = sample.slice();
    this.update();
  }

  draw(strokes) {
    this.strokes = strokes;
    this.shown = null;
    this.update();
  }

  update() {
    this.paint();
    this.changed();
  }

  // The numbers that the net reads; null if the sheet is empty.
  sample() {
    if (this.shown) return this.shown;
    return this.strokes.length ? this.rendered() : null;
  }

  // From points on the sheet to pixels of a sample.
  frame() {
    const d = this.record.drawing, points = this.strokes.flat();
    if (!d.fits) return ([x, y]) => [x * this.columns, y * this.rows];
    const xs = points.map((p) => p[0] * this.columns), ys = points.map((p) => p[1] * this.rows);
    const left = Math.min(...xs), right = Math.max(...xs), top = Math.min(...ys), bottom = Math.max(...ys);
    const room = { width: d.width - d.stroke, height: d.height - d.stroke };
    const width = Math.max(right - left, this.columns / 12), height = Math.max(bottom - top, this.rows / 12);
    const scaleX = Math.min(room.width / width, room.height / height);
    const scaleY = Math.min(room.height / height, scaleX * STRETCH);
    const middleX = (left + right) / 2, middleY = (top + bottom) / 2;
    return ([x, y]) => [
      (x * this.columns - middleX) * scaleX + d.x, (y * this.rows - middleY) * scaleY + d.y,
    ];
  }

  // The width of strokes, in pixels of a sample; thicker for short ones, if those of the data are.
  width(strokes) {
    const { stroke, area } = this.record.drawing;
    const hypot = (s) => s.slice(1).map((p, i) => Math.hypot(p[0] - s[i][0], p[1] - s[i][1]));
    const path = strokes.flatMap(hypot).reduce((a, b) => a + b, 0);
    return area ? Math.min(THICKEST * stroke, Math.max(THINNEST * stroke, area / Math.max(path, 1))) : stroke;
  }

  rendered() {
    const pen = this.fine.getContext("2d", { willReadFrequently: true }), place = this.frame();
    const { paper, ink } = this.record.drawing, moved = this.strokes.map((stroke) => stroke.map(place));
    pen.clearRect(0, 0, this.fine.width, this.fine.height);
    lines(pen, moved.map((s) => s.map(([x, y]) => [x * FINE, y * FINE])), this.width(moved) * FINE, "#000");
    const alpha = pen.getImageData(0, 0, this.fine.width, this.fine.height).data;
    const sample = new Float32Array(this.rows * this.columns);
    for (let r = 0; r < this.fine.height; r++)
      for (let c = 0; c < this.fine.width; c++)
        sample[Math.floor(r / FINE) * this.columns + Math.floor(c / FINE)] += alpha[4 * (r * this.fine.width + c) + 3];
    return sample.map((sum) => paper + (sum / (255 * FINE * FINE)) * (ink - paper));
  }

  paint() {
    const pen = this.sheet.getContext("2d"), side = this.sheet.width, style = getComputedStyle(this.sheet);
    pen.clearRect(0, 0, side, side);
    const sample = this.sample();
    this.placeholder.hidden = sample !== null;
    find("seen-place").hidden = sample === null;
    const pixels = this.seen.getContext("2d");
    pixels.clearRect(0, 0, this.columns, this.rows);
    if (sample) picture(pixels, sample, this.record, style.color);
    if (this.shown) {
      pen.imageSmoothingEnabled = false;
      pen.drawImage(this.seen, 0, 0, side, side);
    } else {
      lines(pen, this.strokes.map((s) => s.map(([x, y]) => [x * side, y * side])), side * 0.07, style.color);
    }
  }
}

function lines(pen, strokes, width, colour) {
  Object.assign(pen, { lineWidth: width, lineCap: "round", lineJoin: "round", strokeStyle: colour });
  for (const stroke of strokes) {
    pen.beginPath();
    stroke.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
    if (stroke.length === 1) pen.lineTo(stroke[0][0] + 0.01, stroke[0][1]);
    pen.stroke();
  }
}

// A sample as pixels: grey ones in the colour of the text, or in red, green and blue.
function picture(pen, sample, record, colour) {
  const [channels, rows, columns] = record.shape, image = pen.createImageData(columns, rows), size = rows * columns;
  const { low, width } = record.samples, tone = (v) => 255 * (v - low[0]) / width[0];
  const [red, green, blue] = colour.match(/\d+(\.\d+)?/g).map(Number);
  for (let i = 0; i < size; i++) {
    const ink = record.drawing ? (sample[i] - record.drawing.paper) / (record.drawing.ink - record.drawing.paper) : 1;
    image.data.set(channels === 3
      ? [tone(sample[i]), tone(sample[size + i]), tone(sample[2 * size + i]), 255]
      : [red, green, blue, 255 * ink], 4 * i);
  }
  pen.putImageData(image, 0, 0);
}
