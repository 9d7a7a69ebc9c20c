// Plots by hand on a canvas: accuracy over the samples learned, and the weights of the first layer.

const MOST_POINTS = 600;

class Chart {
  constructor(canvas) {
    this.canvas = canvas;
    this.clear();
    new ResizeObserver(() => this.paint()).observe(canvas);
  }

  clear() {
    this.points = []; // [samples, accuracy of the net, of the control, of the one-pass head]
    this.events = []; // [samples, text]
    this.paint();
  }

  add(samples, net, control, head = null) {
    this.points.push([samples, net, control, head]);
    if (this.points.length > MOST_POINTS) this.points = this.points.filter((_, i) => i % 2 === 0 || i === MOST_POINTS);
    this.paint();
  }

  mark(samples, text) {
    this.events.push([samples, text]);
    this.paint();
  }

  paint() {
    const { pen, width, height } = fitted(this.canvas), style = getComputedStyle(this.canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    const end = this.points.length ? this.points[this.points.length - 1][0] : 0;
    const last = niceEnd(end), box = { left: 50, right: width - 64, top: 12, bottom: height - 30 };
    const x = (n) => box.left + (box.right - box.left) * n / last;
    const y = (a) => box.bottom - (box.bottom - box.top) * a;
    pen.font = `13px ${style.fontFamily}`;
    this.axes(pen, box, x, y, last, colour);
    for (const [at, text] of this.events) this.event(pen, box, x(at), text, colour);
    const others = [[2, colour("--control"), [6, 5]], [3, colour("--once"), [2, 4]]];
    const series = [[1, colour("--net"), []], ...others.filter(([k]) => this.points.some((p) => p[k] !== null))];
    for (const [k, ink, dash] of series.reverse()) this.line(pen, k, ink, dash, x, y);
    this.ends(pen, series, box, x, y);
  }

  axes(pen, box, x, y, last, colour) {
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      pen.strokeStyle = colour(share ? "--line" : "--axis");
      segment(pen, box.left, Math.round(y(share)) + 0.5, box.right, Math.round(y(share)) + 0.5);
      pen.fillStyle = colour("--quiet");
      pen.textAlign = "right";
      pen.fillText(`${100 * share} %`, box.left - 8, y(share));
    }
    pen.textBaseline = "top";
    for (const i of box.right - box.left > 260 ? [0, 1, 2] : [0, 2]) {
      pen.textAlign = ["left", "center", "right"][i];
      pen.fillText(i === 2 ? `${count(last)} samples` : count(last * i / 2), x(last * i / 2), box.bottom + 10);
    }
  }

  line(pen, k, ink, dash, x, y) {
    Object.assign(pen, { strokeStyle: ink, lineWidth: k === 1 ? 2.5 : 2, lineJoin: "round", lineCap: "round" });
    pen.setLineDash(dash);
    pen.beginPath();
    this.points.filter((p) => p[k] !== null)
      .forEach((p, i) => (i ? pen.lineTo(x(p[0]), y(p[k])) : pen.moveTo(x(p[0]), y(p[k]))));
    pen.stroke();
    pen.setLineDash([]);
  }

  // A dot and the number where each line ends; numbers that would overlap are moved apart.
  ends(pen, series, box, x, y) {
    const p = this.points[this.points.length - 1];
    if (!p) return;
    const last = series.filter(([k]) => p[k] !== null);
    const labels = last.map(([k, ink]) => ({ k, ink, at: y(p[k]) })).sort((a, b) => a.at - b.at);
    for (let i = 1; i < labels.length; i++) labels[i].at = Math.max(labels[i].at, labels[i - 1].at + 17);
    const over = Math.max(0, labels[labels.length - 1].at - (box.bottom - 4));
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    for (const { k, ink, at } of labels) {
      pen.fillStyle = ink;
      pen.beginPath();
      pen.arc(x(p[0]), y(p[k]), k === 1 ? 4.5 : 3.5, 0, 7);
      pen.fill();
      pen.font = pen.font.replace(/^(bold |600 )?/, k === 1 ? "600 " : "");
      pen.fillText(`${(100 * p[k]).toFixed(1)} %`, x(p[0]) + 10, at - over);
    }
  }

  event(pen, box, at, text, colour) {
    pen.strokeStyle = pen.fillStyle = colour("--quiet");
    pen.setLineDash([2, 4]);
    segment(pen, Math.round(at) + 0.5, box.top, Math.round(at) + 0.5, box.bottom);
    pen.setLineDash([]);
    pen.textBaseline = "bottom";
    pen.textAlign = at > (box.left + box.right) / 2 ? "right" : "left";
    pen.fillText(text, at + (pen.textAlign === "left" ? 5 : -5), box.bottom - 6);
  }
}

// How learning has changed the weights of each hidden unit, as a small picture; all have one scale.
function paintUnits(canvas, changes, { units, rows, columns }) {
  const shown = Math.min(units, 64), width = canvas.clientWidth, gap = width < 420 ? 4 : 7;
  const across = acrossFor(shown, width), side = (width - gap * (across - 1)) / across, high = side * rows / columns;
  canvas.style.height = `${Math.ceil(shown / across) * (high + gap) - gap}px`;
  const { pen } = fitted(canvas), tile = new Tile(columns, rows), size = rows * columns, style = getComputedStyle(canvas);
  const [plus, minus, zero] = ["--plus", "--minus", "--zero"].map((name) => rgb(style, name));
  const top = Math.max(quantile(changes.subarray(0, shown * size), 0.99), 0.05);
  pen.imageSmoothingEnabled = false;
  for (let u = 0; u < shown; u++) {
    for (let i = 0; i < size; i++) {
      const change = changes[u * size + i], share = Math.min(1, Math.abs(change) / top), ink = change > 0 ? plus : minus;
      tile.set(i, zero.map((z, k) => z + (ink[k] - z) * share));
    }
    pen.drawImage(tile.done(), (u % across) * (side + gap), Math.floor(u / across) * (high + gap), side, high);
  }
}

function quantile(numbers, share) {
  return Float32Array.from(numbers, Math.abs).sort()[Math.floor(share * (numbers.length - 1))];
}

function acrossFor(shown, width) {
  const wish = Math.max(4, Math.floor(width / 34));
  for (let n = Math.min(wish, 8); n >= 4; n--) if (shown % n === 0) return n;
  return Math.min(wish, shown, 8);
}

class Tile {
  constructor(width, height) {
    this.canvas = Object.assign(document.createElement("canvas"), { width, height });
    this.pen = this.canvas.getContext("2d");
    this.image = this.pen.createImageData(width, height);
  }
  set(i, [red, green, blue]) { this.image.data.set([red, green, blue, 255], 4 * i); }
  done() {
    this.pen.putImageData(this.image, 0, 0);
    return this.canvas;
  }
}

// The canvas with as many pixels as the screen has, to be drawn on in CSS pixels.
function fitted(canvas) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

function segment(pen, x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
}

// The smallest of 1, 2, 4, 6, 8 times a power of ten that is not below n.
function niceEnd(n) {
  const power = 10 ** Math.floor(Math.log10(Math.max(n, 100)));
  return [1, 2, 4, 6, 8, 10].map((k) => k * power).find((end) => end >= n);
}

function rgb(style, name) {
  const hex = style.getPropertyValue(name).trim();
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function count(n) { return n.toLocaleString("en"); }
