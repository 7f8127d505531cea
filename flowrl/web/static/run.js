// One run: state, curves, images, missing scores, recipe and journal.

import { get, send } from "/ask.js";
import { format } from "/chart.js";
import { differenceTable } from "/lists.js";
import { Curves, Picture, Slider, ago, attempt, el, heldOut, setText, stateBadge, table } from "/parts.js";

const FIRST_IMAGES = 8;

export function runView(query) {
  const name = query.get("run") ?? "";
  const parts = [
    new Head(name), new CurvesOfRun(name), new HeldOutImages(name), new Samples(name),
    new Failures(), new Recipe(name), new Journal(),
  ];
  const root = el("div", {}, parts.map((part) => part.root));
  const curves = parts[1];

  async function update(signal) {
    const details = await get(`/api/run?${new URLSearchParams({ run: name })}`, signal);
    const current = await curves.update(signal);
    for (const part of parts) part.show?.(details.data, details.changed, signal);
    return current ? null : 0; // at once where other curves were chosen
  }

  return { title: name, root, update, leave: () => parts.forEach((part) => part.leave?.()) };
}

class Head {
  constructor(name) {
    this.name = name;
    this.state = el("span", {});
    this.facts = el("p", { class: "muted" });
    this.detail = el("p", { class: "detail" });
    this.progress = el("progress", { max: 1, value: 0, "aria-label": "Iterations done" });
    this.stop = el("button", { type: "button", hidden: true, onclick: () => this.ask("stop") }, "Stop");
    this.resume = el("button", { type: "button", hidden: true, onclick: () => this.ask("resume") }, "Resume");
    this.held = el("div", { class: "held-out" });
    this.root = el("section", {}, el("h1", {}, `${name} `), this.state, this.facts, this.progress,
      this.detail, this.held, el("div", { class: "bar" }, this.stop, this.resume));
  }

  async ask(what) {
    const done = what === "stop"
      ? "Stopping: it completes its iteration and saves." : "Resuming: its output is on the page Start.";
    const answer = await attempt(() => send(`/api/${what}`, { run: this.name }), done);
    if (answer) this[what].disabled = true;
  }

  show(run, changed) {
    const of = run.iterations ? ` of ${run.iterations}` : "";
    const how = [run.objective, run.pipeline].filter(Boolean).join(" on ");
    setText(this.facts, [`iteration ${run.step}${of}`, how, ago(run.updated)].filter(Boolean).join(", "));
    if (!changed && this.state.childElementCount) return;
    this.state.replaceChildren(stateBadge(run));
    this.progress.value = run.iterations ? Math.min(1, run.step / run.iterations) : 0;
    this.progress.hidden = !run.iterations;
    setText(this.detail, run.damaged ? `${run.detail} ${run.damaged} lines of metrics.jsonl are damaged.` : run.detail);
    this.detail.className = `detail ${run.state}`;
    this.held.replaceChildren(...heldOut(run, 8));
    const running = run.state === "running";
    this.stop.hidden = !running;
    this.stop.disabled = run.stopping;
    const rest = ["stopped", "failed", "killed"].includes(run.state) && run.checkpoints.length > 0;
    if (this.resume.hidden && rest) this.resume.disabled = false;
    this.resume.hidden = !rest;
  }
}

class CurvesOfRun {
  constructor(name) {
    this.wake = 0;
    this.curves = new Curves([name], () => { this.wake += 1; });
    this.root = el("section", {}, el("h2", {}, "Curves"), this.curves.root);
  }

  async update(signal) {
    const before = this.wake;
    const { data } = await get(this.curves.path(), signal);
    this.root.hidden = !data.names.length;
    return this.curves.take(data) && before === this.wake;
  }

  leave() { this.curves.leave(); }
}

class HeldOutImages {
  constructor(name) {
    this.name = name;
    this.slider = new Slider("Held-out images over time", (step) => this.load(step));
    this.grid = el("div", { class: "pairs" });
    this.more = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.all() }, "Show all");
    this.root = el("section", { hidden: true }, el("h2", {}, "Held-out images"),
      el("p", { class: "muted" }, "The same prompts and noise: base model on the left, this run on the right."),
      this.slider.root, this.grid, this.more);
    this.pairs = [];
    this.limit = FIRST_IMAGES;
    this.loaded = null;
    this.stop = new AbortController();
  }

  show(run) {
    this.root.hidden = !run.evaluations.length;
    this.base = run.evaluations[0];
    if (run.evaluations.join() !== this.slider.steps.join()) this.slider.take(run.evaluations);
  }

  path(kind, step, row) {
    const query = new URLSearchParams({ run: this.name, step });
    if (row !== undefined) query.set("row", row);
    return `/api/heldout${kind}?${query}`;
  }

  async load(step) {
    if (step === this.loaded) return;
    this.loaded = step;
    let images;
    try {
      images = (await get(this.path("", step), this.stop.signal)).data;
    } catch {
      images = { prompts: [], names: [], scores: [] };
      this.grid.replaceChildren(el("p", { class: "missing" }, "The images of this evaluation cannot be read."));
      this.pairs = [];
    }
    if (step !== this.loaded) return; // the slider has moved on
    this.showPairs(step, images);
  }

  showPairs(step, images) {
    const count = Math.min(this.limit, images.prompts.length);
    while (this.pairs.length < count) {
      const pair = { base: new Picture(""), now: new Picture(""), prompt: el("p", { class: "prompt" }), scores: el("p", { class: "muted" }) };
      pair.root = el("figure", { class: "pair" }, pair.base.root, pair.now.root,
        el("figcaption", {}, pair.prompt, pair.scores));
      if (!this.pairs.length) this.grid.replaceChildren();
      this.pairs.push(pair);
      this.grid.append(pair.root);
    }
    for (const pair of this.pairs.splice(count)) { pair.root.remove(); pair.base.leave(); pair.now.leave(); }
    this.pairs.forEach((pair, row) => {
      setText(pair.prompt, images.prompts[row]);
      const scores = images.scores[row] ?? [];
      setText(pair.scores, images.names.map((name, i) => `${name} ${format(scores[i])}`).join(", "));
      const short = images.prompts[row].slice(0, 120);
      pair.base.show(this.path("/image", this.base, row), `Base: ${short}`, this.stop.signal);
      pair.now.show(this.path("/image", step, row), `After ${step}: ${short}`, this.stop.signal);
    });
    this.more.hidden = images.prompts.length <= this.limit;
    setText(this.more, `Show all ${images.prompts.length}`);
  }

  all() {
    this.limit = 1000;
    const step = this.loaded;
    this.loaded = null;
    this.load(step);
  }

  leave() {
    this.stop.abort();
    for (const pair of this.pairs) { pair.base.leave(); pair.now.leave(); }
  }
}

class Samples {
  constructor(name) {
    this.name = name;
    this.stop = new AbortController();
    this.picture = new Picture("");
    this.slider = new Slider("Training samples over time", (step) => this.load(step));
    this.root = el("section", { hidden: true }, el("h2", {}, "Training samples"), this.slider.root,
      el("div", { class: "sheet", tabindex: 0, role: "group", "aria-label": "Samples, scrollable" }, this.picture.root));
  }

  show(run) {
    this.root.hidden = !run.samples.length;
    if (run.samples.join() !== this.slider.steps.join()) this.slider.take(run.samples);
  }

  load(step) {
    const query = new URLSearchParams({ run: this.name, step });
    this.picture.show(`/api/sample?${query}`, `Samples of training after iteration ${step}`, this.stop.signal);
  }

  leave() {
    this.stop.abort();
    this.picture.leave();
  }
}

// A section with a table, which is hidden while the table has no rows.
class Section {
  constructor(title) {
    this.place = el("div", {});
    this.root = el("section", { hidden: true }, el("h2", {}, title), this.place);
  }

  show(run) {
    const rows = this.rows(run);
    const now = JSON.stringify(rows);
    if (now === this.shown) return;
    this.shown = now;
    this.root.hidden = !rows.length;
    this.place.replaceChildren(this.content(rows));
  }
}

class Failures extends Section {
  constructor() { super("Missing scores"); }

  rows(run) {
    const words = { "reward/invalid": "left out of training" };
    return run.metrics
      .filter(([name, its]) => (name.startsWith("reward/missing/") || Object.hasOwn(words, name)) && its.mean > 0)
      .map(([name, its]) => [Object.hasOwn(words, name) ? words[name] : name.slice("reward/missing/".length), share(its.mean), share(its.last)]);
  }

  content(rows) { return table("Share of images without a score", ["Reward", "Whole run", "Last iteration"], rows); }
}

const share = (value) => (value === null ? "n/a" : `${(100 * value).toPrecision(3)} %`);

class Recipe {
  constructor(name) {
    this.name = name;
    this.text = el("pre", { tabindex: 0, "aria-label": "Recipe" });
    this.other = el("select", { onchange: () => this.compare() });
    this.difference = el("div", {});
    this.choice = el("label", { class: "inline", hidden: true }, "Compare with", this.other);
    this.root = el("section", {}, el("h2", {}, "Recipe"),
      this.choice, this.difference,
      el("details", { ontoggle: () => this.load() }, el("summary", {}, "Every option"), this.text));
    this.names = null;
  }

  async show() {
    if (this.names) return;
    this.names = [];
    const { data } = await get("/api/runs");
    this.names = data.runs.map((run) => run.run).filter((name) => name !== this.name);
    this.choice.hidden = !this.names.length;
    this.other.append(el("option", { value: "" }, "choose a run"),
      ...this.names.map((name) => el("option", { value: name }, name)));
  }

  async compare() {
    if (!this.other.value) return this.difference.replaceChildren();
    await attempt(async () => this.difference.replaceChildren(await differenceTable(this.name, this.other.value)));
  }

  async load() {
    if (this.text.textContent) return;
    await attempt(async () => {
      const { data } = await get(`/api/recipe?${new URLSearchParams({ run: this.name })}`);
      this.text.textContent = data.text || "The run has saved no recipe.";
    });
  }
}

class Journal extends Section {
  constructor() { super("Journal"); }

  rows(run) {
    return run.events.map((event) => [
      event.time.replace("T", " ").replace("+00:00", ""), event.event, event.step === null ? "" : String(event.step), event.detail,
    ]);
  }

  content(rows) {
    return el("details", { open: rows.length < 12 }, el("summary", {}, `${rows.length} events`),
      table("Newest first, in UTC", ["Time", "Event", "Iteration", "Detail"], rows));
  }
}
