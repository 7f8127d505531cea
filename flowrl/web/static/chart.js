// Draws curves on a canvas, with a cursor for the mouse, for touch and for the arrow keys.

const DASHES = [[], [7, 4], [2, 4]];
const COLORS = 8; // --c0 to --c7 in page.css

export function format(value) {
  if (value === null || value === undefined) return "n/a";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(3)).toExponential();
  return String(Number(value.toPrecision(4)));
}

export class Chart {
  // Fills `figure` with a title, a canvas and the values at the cursor.
  constructor(figure, title) {
    this.figure = figure;
    this.series = [];
    this.cursor = null; // an x value
    this.smooth = true;
    this.caption = document.createElement("figcaption");
    this.caption.textContent = title;
    this.title = title;
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.reading = document.createElement("p");
    this.reading.className = "reading";
    figure.append(this.caption, this.canvas, this.reading);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.moveTo(null));
    this.canvas.addEventListener("blur", () => this.moveTo(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.canvas);
  }

  remove() {
    this.resized.disconnect();
    this.figure.remove();
  }

  // series: {label, index (of its colour), x, y}.
  show(series, smooth) {
    this.series = series.filter((one) => one.x.length);
    this.smooth = smooth;
    this.canvas.setAttribute("aria-label", `${this.title}. ${this.inWords()}`);
    this.draw();
  }

  inWords() {
    if (!this.series.length) return "No values yet.";
    return this.series.map((one) => {
      const points = one.y.map((y, i) => [y, one.x[i]]).filter(([y]) => y !== null);
      if (!points.length) return `${one.label}: no value`;
      const values = points.map(([y]) => y);
      const [first, last] = [points[0], points[points.length - 1]];
      return `${one.label}: ${format(first[0])} at ${first[1]}, ${format(last[0])} at ${last[1]}, ` +
        `lowest ${format(Math.min(...values))}, highest ${format(Math.max(...values))}`;
    }).join(". ");
  }

  // --- the cursor

  steps() {
    const all = new Set();
    for (const one of this.series) for (const x of one.x) all.add(x);
    return [...all].sort((a, b) => a - b);
  }

  point(event) {
    if (!this.frame) return;
    const at = event.clientX - this.canvas.getBoundingClientRect().left;
    const { left, right, x0, x1 } = this.frame;
    const x = x0 + ((at - left) / Math.max(1, right - left)) * (x1 - x0);
    const steps = this.steps();
    if (!steps.length) return;
    this.moveTo(steps.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best)));
  }

  key(event) {
    const steps = this.steps();
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9 };
    if (!steps.length || !(event.key in moves)) return;
    event.preventDefault();
    const at = this.cursor === null ? steps.length : steps.findIndex((x) => x >= this.cursor);
    const next = Math.min(steps.length - 1, Math.max(0, at + moves[event.key]));
    this.reading.setAttribute("aria-live", "polite");
    this.moveTo(steps[next]);
  }

  moveTo(x) {
    if (x === this.cursor) return;
    this.cursor = x;
    this.draw();
  }

  read() {
    if (!this.series.length) return "no values yet";
    const several = this.series.length > 1;
    const values = this.series.map((one) => {
      let at = one.x.length - 1;
      if (this.cursor !== null) {
        at = one.x.findIndex((x) => x >= this.cursor);
        if (at < 0) return null;
      }
      return [one, `${several ? `${one.label} ` : ""}${format(one.y[at])}`, one.x[at]];
    }).filter(Boolean);
    const step = this.cursor === null && several ? "latest" : `at ${this.cursor ?? values[0][2]}`;
    return [step, values];
  }

  showReading() {
    const read = this.read();
    this.reading.replaceChildren();
    if (typeof read === "string") {
      this.reading.textContent = read;
      return;
    }
    const [step, values] = read;
    this.reading.append(`${step}: `);
    for (const [one, text] of values) {
      const value = document.createElement("span");
      value.className = `value c${one.index % COLORS}`;
      value.textContent = text;
      this.reading.append(value, " ");
    }
  }

  // --- drawing

  draw() {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!width || !height) return;
    const scale = window.devicePixelRatio || 1;
    const size = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== size[0]) this.canvas.width = size[0];
    if (this.canvas.height !== size[1]) this.canvas.height = size[1];
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(this.canvas);
    const color = (name) => style.getPropertyValue(name).trim();
    this.showReading();
    if (!this.series.length) return;
    const ranges = this.ranges();
    pen.font = `12px ${style.fontFamily}`;
    const labels = ticks(ranges.y0, ranges.y1, 4).map((y) => [y, format(y)]);
    const left = Math.ceil(Math.max(...labels.map(([, text]) => pen.measureText(text).width))) + 8;
    this.frame = { ...ranges, left, right: width - 8, top: 8, bottom: height - 20 };
    this.axes(pen, labels, color);
    pen.save();
    pen.beginPath();
    pen.rect(left, 4, width - left, this.frame.bottom - 2);
    pen.clip();
    for (const one of this.series) this.curve(pen, one, color(`--c${one.index % COLORS}`));
    pen.restore();
    if (this.cursor !== null) {
      pen.strokeStyle = color("--muted");
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(this.x(this.cursor), this.frame.top);
      pen.lineTo(this.x(this.cursor), this.frame.bottom);
      pen.stroke();
    }
  }

  ranges() {
    const ys = [];
    let x0 = Infinity, x1 = -Infinity;
    for (const one of this.series) {
      for (const y of one.y) if (y !== null) ys.push(y);
      x0 = Math.min(x0, one.x[0]);
      x1 = Math.max(x1, one.x[one.x.length - 1]);
    }
    let y0 = ys.reduce((a, b) => Math.min(a, b), Infinity);
    let y1 = ys.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!ys.length) [y0, y1] = [0, 1];
    const pad = (y1 - y0) * 0.06 || Math.abs(y0) * 0.1 || 1;
    if (x0 === x1) x0 -= 1;
    return { x0, x1, y0: y0 - pad, y1: y1 + pad };
  }

  x(value) {
    const { left, right, x0, x1 } = this.frame;
    return left + ((value - x0) / (x1 - x0)) * (right - left);
  }

  y(value) {
    const { top, bottom, y0, y1 } = this.frame;
    return bottom - ((value - y0) / (y1 - y0)) * (bottom - top);
  }

  axes(pen, labels, color) {
    const { left, right, top, bottom, x0, x1 } = this.frame;
    pen.strokeStyle = color("--line");
    pen.fillStyle = color("--muted");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const [value, text] of labels) {
      const y = Math.round(this.y(value)) + 0.5;
      if (y < top || y > bottom) continue;
      pen.beginPath();
      pen.moveTo(left, y);
      pen.lineTo(right, y);
      pen.stroke();
      pen.fillText(text, left - 6, y);
    }
    pen.textBaseline = "alphabetic";
    for (const value of ticks(x0, x1, Math.max(2, Math.floor((right - left) / 90)))) {
      if (!Number.isInteger(value)) continue;
      const text = String(value), half = pen.measureText(text).width / 2;
      pen.textAlign = "center";
      pen.fillText(text, Math.min(right - half, Math.max(left + half, this.x(value))), bottom + 16);
    }
  }

  curve(pen, one, color) {
    const dash = DASHES[Math.floor(one.index / COLORS) % DASHES.length];
    pen.strokeStyle = pen.fillStyle = color;
    pen.setLineDash(dash);
    const window_ = this.smooth && one.y.length > 80 ? Math.round(one.y.length / 30) : 1;
    if (window_ > 1) {
      pen.globalAlpha = this.series.length > 3 ? 0.12 : 0.35;
      pen.lineWidth = 1;
      this.line(pen, one.x, one.y);
    }
    pen.globalAlpha = 1;
    pen.lineWidth = 2;
    this.line(pen, one.x, window_ > 1 ? averaged(one.y, window_) : one.y);
    pen.setLineDash([]);
    if (one.x.length <= 30) {
      for (let i = 0; i < one.x.length; i += 1) {
        if (one.y[i] === null) continue;
        pen.beginPath();
        pen.arc(this.x(one.x[i]), this.y(one.y[i]), 3, 0, 7);
        pen.fill();
      }
    }
  }

  line(pen, xs, ys) {
    pen.beginPath();
    let open = false;
    for (let i = 0; i < xs.length; i += 1) {
      if (ys[i] === null) { open = false; continue; } // a missing value is a gap
      if (open) pen.lineTo(this.x(xs[i]), this.y(ys[i]));
      else pen.moveTo(this.x(xs[i]), this.y(ys[i]));
      open = true;
    }
    pen.stroke();
  }
}

// The mean of up to `size` values around each, missing ones left out.
export function averaged(values, size) {
  const half = Math.floor(size / 2), sums = [0], counts = [0];
  for (const value of values) {
    sums.push(sums[sums.length - 1] + (value ?? 0));
    counts.push(counts[counts.length - 1] + (value === null ? 0 : 1));
  }
  return values.map((value, i) => {
    if (value === null) return null;
    const from = Math.max(0, i - half), to = Math.min(values.length, i + half + 1);
    return (sums[to] - sums[from]) / (counts[to] - counts[from]);
  });
}

// About `count` round numbers between two.
export function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? rough;
  const marks = [];
  for (let i = Math.ceil(low / step); i * step <= high && marks.length < 50; i += 1) {
    marks.push(Number((i * step).toPrecision(12)));
  }
  return marks;
}
