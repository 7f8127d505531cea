// What several views are made of. Text is always set as text: nothing that a run holds is markup.

import { image } from "/ask.js";
import { Chart, format } from "/chart.js";

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export function tell(text) {
  document.getElementById("status").textContent = text;
}

// Does what a button is for, and shows what the server refuses.
export async function attempt(work, done) {
  try {
    const answer = await work();
    if (done) tell(done);
    return answer;
  } catch (error) {
    tell(`${error.message}.`);
    return null;
  }
}

export function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

export function table(caption, head, rows) {
  return el("div", { class: "wide" }, el("table", {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => (
      i === 0 ? el("th", { scope: "row" }, cell) : el("td", { "data-label": head[i] }, cell)
    )))))));
}

export function runLink(name) {
  return `#/run?run=${encodeURIComponent(name)}`;
}

export function ago(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const past = Math.max(0, Date.now() / 1000 - seconds);
  if (past < 90) return "just now";
  if (past < 5400) return `${Math.round(past / 60)} min ago`;
  if (past < 129600) return `${Math.round(past / 3600)} h ago`;
  return `${Math.round(past / 86400)} days ago`;
}

export function stateBadge(run) {
  const stopping = run.stopping && run.state === "running";
  return el("span", { class: `state ${run.state}` }, stopping ? "stopping" : run.state);
}

export function signed(change) {
  return `${change < 0 ? "" : "+"}${format(change)}`;
}

// A value by its name. A metric may be called constructor, which every object has.
export function lookup(values, name) {
  return values && Object.hasOwn(values, name) ? values[name] : undefined;
}

// Base and last value of what was measured on held-out prompts.
export function heldOut(run, most = 3) {
  const names = Object.keys(run.held_out).filter((name) => name.split("/").length === 2);
  return names.slice(0, most).map((name) => {
    const [base, last] = [lookup(run.base, name), run.held_out[name]];
    const both = typeof base === "number" && typeof last === "number";
    const change = both && run.held_out_step > 0 ? ` (${signed(last - base)})` : "";
    const text = run.held_out_step > 0 ? `${format(base)} to ${format(last)}${change}` : format(base);
    return el("div", {}, el("span", { class: "muted" }, `${name.slice(5)} `), text);
  });
}

// --- curves

export class Curves {
  // Charts of held-out scores (`held`); those of training, and what to choose metrics with (`root`).
  constructor(runs, onChoice) {
    this.runs = runs;
    this.names = [];
    this.chosen = []; // by the server, until somebody chooses
    this.byHand = false;
    this.onChoice = onChoice;
    this.charts = new Map();
    this.last = null;
    this.filter = el("input", { type: "search", oninput: () => this.listNames(), autocomplete: "off" });
    this.list = el("div", { class: "names", role: "group", "aria-label": "Metrics" });
    this.smooth = el("input", { type: "checkbox", checked: true, onchange: () => this.redraw() });
    this.held = el("div", { class: "charts" });
    this.place = el("div", { class: "charts" });
    this.summary = el("summary", {}, "Choose metrics");
    this.root = el("div", {},
      el("div", { class: "bar" }, el("label", { class: "check" }, this.smooth, "Smooth")),
      this.place,
      el("details", { class: "chooser" }, this.summary,
        el("label", {}, "Filter", this.filter), this.list));
  }

  path() {
    const query = new URLSearchParams();
    for (const run of this.runs) query.append("run", run);
    for (const name of this.chosen) query.append("metric", name);
    query.set("points", this.runs.length > 4 ? "250" : "600"); // about one a pixel or two
    return `/api/curves?${query}`;
  }

  // Shows what the server has; returns whether the chosen curves are among it.
  take(data) {
    if (data === this.last) return true;
    if (data.names.join("\n") !== this.names.join("\n")) {
      this.names = data.names;
      this.listNames();
    }
    if (!this.byHand && data.chosen.join("\n") !== this.chosen.join("\n")) {
      this.chosen = data.chosen;
      this.listNames();
      return false; // their curves come with the next answer
    }
    this.last = data;
    this.redraw();
    return true;
  }

  redraw() {
    const chosen = this.names.filter((name) => this.chosen.includes(name));
    for (const [name, chart] of this.charts) {
      if (!chosen.includes(name)) { chart.remove(); this.charts.delete(name); }
    }
    for (const name of chosen) {
      if (!this.charts.has(name)) {
        const held = name.startsWith("eval/");
        const figure = el("figure", { class: held ? "chart held" : "chart", "data-metric": name });
        this.charts.set(name, new Chart(figure, held ? `${name.slice(5)}, held-out` : name));
        const place = held ? this.held : this.place;
        const after = chosen.slice(chosen.indexOf(name) + 1)
          .find((n) => this.charts.get(n)?.figure.parentElement === place);
        place.insertBefore(figure, after ? this.charts.get(after).figure : null);
      }
      if (!this.last) continue;
      const series = this.runs.map((run, index) => {
        const curve = lookup(lookup(this.last.runs, run), name);
        return curve ? { label: run, index, ...curve } : null;
      }).filter(Boolean);
      this.charts.get(name).show(series, this.smooth.checked && !name.startsWith("eval/"));
    }
  }

  listNames() {
    const wanted = this.filter.value.trim().toLowerCase();
    const listed = this.names.filter((name) => name.toLowerCase().includes(wanted));
    const focused = document.activeElement?.value;
    this.list.replaceChildren(...listed.slice(0, 300).map((name) => el("label", { class: "check" },
      el("input", {
        type: "checkbox", value: name, checked: this.chosen.includes(name),
        onchange: (event) => this.choose(name, event.target.checked),
      }), name)));
    if (focused) {
      [...this.list.querySelectorAll("input")].find((input) => input.value === focused)?.focus();
    }
  }

  choose(name, on) {
    const rest = this.chosen.filter((one) => one !== name);
    this.byHand = true;
    this.chosen = on ? [...rest, name] : rest;
    this.redraw();
    this.onChoice();
  }

  leave() {
    for (const chart of this.charts.values()) chart.remove();
    this.charts.clear();
  }
}

// --- images

export class Picture {
  // An image of the server; the words "no image" where the server has none.
  constructor(alternative) {
    this.image = el("img", { alt: alternative, hidden: true });
    this.missing = el("span", { class: "missing", hidden: true }, "no image");
    this.root = el("span", { class: "picture" }, this.image, this.missing);
    this.address = null;
    this.path = null;
  }

  async show(path, alternative, signal) {
    if (alternative) this.image.alt = alternative;
    if (path === this.path) return;
    this.path = path;
    let address = null;
    try {
      address = path === null ? null : await image(path, signal);
    } catch {
      if (signal?.aborted) return;
    }
    if (path !== this.path) { // another image is shown by now
      if (address) URL.revokeObjectURL(address);
      return;
    }
    this.leave();
    this.address = address;
    this.image.hidden = !address;
    this.missing.hidden = Boolean(address);
    if (address) this.image.src = address;
    else this.image.removeAttribute("src");
  }

  leave() {
    if (this.address) URL.revokeObjectURL(this.address);
    this.address = null;
  }
}

// A slider over iterations, which stays at the newest until somebody moves it.
export class Slider {
  constructor(label, onMove) {
    this.steps = [];
    this.onMove = onMove;
    this.input = el("input", { type: "range", min: 0, max: 0, step: 1, oninput: () => this.moved() });
    this.output = el("output", {});
    this.root = el("div", { class: "slider" }, el("label", {}, label, this.input), this.output);
  }

  step() {
    return this.steps[Number(this.input.value)] ?? null;
  }

  take(steps) {
    const before = this.step(), newest = before === null || before === this.steps[this.steps.length - 1];
    this.steps = steps;
    this.input.max = String(Math.max(0, steps.length - 1));
    const at = steps.indexOf(before);
    this.input.value = String(newest || at < 0 ? steps.length - 1 : at);
    this.input.disabled = steps.length < 2;
    this.moved();
  }

  moved() {
    const step = this.step();
    const text = step === null ? "" : step === 0 ? "the base, before training" : `after iteration ${step}`;
    this.output.textContent = text;
    this.input.setAttribute("aria-valuetext", text);
    if (step !== null) this.onMove(step);
  }
}
