// Draws curves by uPlot, with a cursor for the mouse, for touch and for the arrow keys.

const { uPlot } = window;
const DASHES = [[], [7, 4], [2, 4]];
const COLORS = 8; // --c0 to --c7 in page.css
const MOST_DOTS = 30; // values of a curve up to which each has a dot
const MOVES = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9 };

export function format(value) {
  if (value === null || value === undefined) return "n/a";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(3)).toExponential();
  return String(Number(value.toPrecision(4)));
}

export class Chart {
  // Fills `figure` with a title, a plot and the values at the cursor.
  constructor(figure, title) {
    this.figure = figure;
    this.series = [];
    this.title = title;
    this.plot = null;
    this.cursor = null; // the number of a value of x
    const part = (tag, name) => Object.assign(document.createElement(tag), { className: name });
    this.caption = part("figcaption", "");
    this.caption.textContent = title;
    this.place = part("div", "plot");
    this.place.tabIndex = 0;
    this.place.setAttribute("role", "img");
    this.reading = part("p", "reading");
    figure.append(this.caption, this.place, this.reading);
    this.place.addEventListener("blur", () => this.moveTo(null));
    this.place.addEventListener("keydown", (event) => this.key(event));
    this.resized = new ResizeObserver(() => this.fit());
    this.resized.observe(this.place);
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.repaint = () => this.plot?.redraw(false);
    this.dark.addEventListener("change", this.repaint);
  }

  remove() {
    this.resized.disconnect();
    this.dark.removeEventListener("change", this.repaint);
    this.plot?.destroy();
    this.figure.remove();
  }

  // series: {label, index (of its colour), x, y, margin (half an interval of each y, or nothing)}.
  show(series, smooth) {
    this.series = series.filter((one) => one.x.length);
    this.place.setAttribute("aria-label", `${this.title}. ${this.inWords()}`);
    const lines = this.series.flatMap((one) => linesOf(one, smooth));
    const data = lines.length ? uPlot.join(lines.map((line) => [line.x, line.y])) : null;
    this.steps = data ? [...data[0]] : [];
    const kind = JSON.stringify(lines.map((line) => [line.one.index, line.kind, line.dots, line.alpha]));
    if (kind !== this.kind || !data) {
      this.plot?.destroy();
      this.plot = null;
      this.kind = kind;
    }
    this.data = data;
    this.lines = lines;
    if (this.plot) this.plot.setData(data);
    else this.fit();
    queueMicrotask(() => this.moveTo(this.cursor)); // once uPlot has its new scales
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

  key(event) {
    if (!this.steps.length || !(event.key in MOVES)) return;
    event.preventDefault();
    this.reading.setAttribute("aria-live", "polite");
    const last = this.steps.length - 1;
    this.moveTo(Math.min(last, Math.max(0, (this.cursor ?? last + 1) + MOVES[event.key])));
  }

  moveTo(index) {
    this.cursor = index;
    const left = index === null ? -10 : this.plot?.valToPos(this.steps[index], "x");
    this.plot?.setCursor({ left, top: index === null ? -10 : 0 }, false);
    this.showReading();
  }

  showReading() {
    this.reading.replaceChildren();
    if (!this.series.length) {
      this.reading.textContent = "no values yet";
      return;
    }
    const several = this.series.length > 1;
    const at = this.cursor === null ? null : this.steps[this.cursor];
    const values = this.series.map((one) => {
      const i = at === null ? one.x.length - 1 : one.x.findIndex((x) => x >= at);
      return i < 0 ? null : { one, i };
    }).filter(Boolean);
    this.reading.append(at === null && several ? "latest: " : `at ${at ?? values[0].one.x[values[0].i]}: `);
    for (const { one, i } of values) {
      const value = document.createElement("span");
      value.className = `value c${one.index % COLORS}`;
      const margin = one.margin?.[i] ? ` ± ${format(one.margin[i])}` : "";
      value.textContent = `${several ? `${one.label} ` : ""}${format(one.y[i])}${margin}`;
      this.reading.append(value, " ");
    }
  }

  // --- drawing

  fit() {
    const size = { width: this.place.clientWidth, height: this.place.clientHeight };
    if (!size.width || !size.height || !this.data) return;
    if (this.plot) this.plot.setSize(size);
    else this.plot = new uPlot(this.options(size), this.data, this.place);
  }

  options(size) {
    const style = getComputedStyle(this.place); // of now: light or dark
    const color = (name) => style.getPropertyValue(name).trim();
    const axis = {
      stroke: () => color("--muted"), font: `12px ${style.fontFamily}`, ticks: { show: false },
      grid: { stroke: () => color("--line"), width: 1 },
    };
    const shade = (line) => color(`--c${line.one.index % COLORS}`) + line.alpha;
    return {
      ...size, legend: { show: false }, padding: [8, 12, 0, 0],
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      scales: { x: { time: false, range: stepsOf }, y: { range: rangeOf } },
      axes: [
        { ...axis, size: 28, gap: 6, grid: { show: false }, incrs: [1, 2, 5].flatMap((n) => [...Array(9).keys()].map((p) => n * 10 ** p)).sort((a, b) => a - b) },
        { ...axis, gap: 4, space: 40, values: (_, marks) => marks.map(format), size: (_, texts) => 12 + 7 * Math.max(2, ...(texts ?? []).map((text) => text.length)) },
      ],
      series: [{}, ...this.lines.map((line) => ({
        stroke: line.kind === "edge" ? null : () => shade(line), width: line.kind === "faint" ? 1 : 2,
        dash: DASHES[Math.floor(line.one.index / COLORS) % DASHES.length],
        points: { show: line.dots, size: 6, fill: () => shade(line) },
      }))],
      bands: this.lines.flatMap((line, i) => (line.band ? [{ series: [i + 1, i + 2], fill: () => shade(line) }] : [])),
      hooks: { setCursor: [(plot) => this.pointed(plot)] },
    };
  }

  // By the mouse or a finger: keys move it themselves.
  pointed(plot) {
    const index = plot.cursor.left < 0 ? null : plot.cursor.idx;
    if (index === this.cursor) return;
    this.cursor = index;
    this.showReading();
  }
}

// What is drawn for a curve: the edges of its intervals, its values faintly, and them or their means.
function linesOf(one, smooth) {
  const size = smooth && one.y.length > 80 ? Math.round(one.y.length / 30) : 1;
  const line = (kind, y, alpha, rest) => ({ one, kind, x: one.x, y, alpha, dots: false, ...rest });
  const edge = (sign) => one.y.map((y, i) => (y === null || !one.margin[i] ? null : y + sign * one.margin[i]));
  return [
    ...(one.margin ? [line("edge", edge(1), "30", { band: true }), line("edge", edge(-1), "30")] : []),
    ...(size > 1 ? [line("faint", one.y, "50")] : []),
    line("curve", size > 1 ? averaged(one.y, size) : one.y, "", { dots: one.x.length <= MOST_DOTS }),
  ];
}

// The axis of x. What uPlot proposes for a single value is 0 to 100.
function stepsOf({ data: [steps] }) {
  const [first, last] = [steps[0], steps[steps.length - 1]];
  return [first === last ? first - 1 : first, last];
}

// The axis of y: some room beside the values, and none below 0 where no value is.
export function rangeOf(_, low, high) {
  if (low === null) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(low) * 0.1 || 1;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
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
