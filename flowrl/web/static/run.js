// One run: images, held-out scores, progress, results, curves, missing scores, recipe and journal.

import { get, image, send } from "/ask.js";
import { format } from "/chart.js";
import { differenceTable } from "/lists.js";
import { Curves, Picture, Slider, ago, attempt, el, heldOut, setText, stateBadge, table } from "/parts.js";

const FIRST_IMAGES = matchMedia("(max-width: 700px)").matches ? 4 : 8;

export function runView(query) {
  const name = query.get("run") ?? "";
  const curves = new CurvesOfRun(name);
  const parts = [
    new Head(name), new HeldOutImages(name), new Samples(name), curves.held, new Progress(),
    new Results(name), curves, new Failures(), new Recipe(name), new Journal(),
  ];
  const root = el("div", {}, parts.map((part) => part.root));

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
    this.detail = el("p", { class: "detail" });
    this.stop = el("button", { type: "button", hidden: true, onclick: () => this.ask("stop") }, "Stop");
    this.resume = el("button", { type: "button", hidden: true, onclick: () => this.ask("resume") }, "Resume");
    this.root = el("section", {}, el("h1", {}, `${name} `), this.state, this.detail,
      el("div", { class: "bar" }, this.stop, this.resume));
  }

  async ask(what) {
    const done = what === "stop"
      ? "Stopping: it completes its iteration and saves." : "Resuming: its output is on the page Start.";
    const answer = await attempt(() => send(`/api/${what}`, { run: this.name }), done);
    if (answer) this[what].disabled = true;
  }

  show(run, changed) {
    if (!changed && this.state.childElementCount) return;
    this.state.replaceChildren(stateBadge(run));
    setText(this.detail, run.damaged ? `${run.detail} ${run.damaged} lines of metrics.jsonl are damaged.` : run.detail);
    this.detail.className = `detail ${run.state}`;
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
    this.root = el("section", { hidden: true }, el("h2", {}, "Curves of training"), this.curves.root);
    this.held = { root: el("section", { hidden: true }, el("h2", {}, "Held-out scores"),
      el("p", { class: "muted" }, "Means over prompts that are never trained on, with 95 % intervals over the prompts."),
      this.curves.held) };
  }

  async update(signal) {
    const before = this.wake;
    const { data } = await get(this.curves.path(), signal);
    this.root.hidden = !data.names.length;
    this.held.root.hidden = !data.names.some((name) => name.startsWith("eval/"));
    return this.curves.take(data) && before === this.wake;
  }

  leave() { this.curves.leave(); }
}

class Progress {
  constructor() {
    this.facts = el("p", {});
    this.pace = el("p", {});
    this.bar = el("progress", { max: 1, value: 0, "aria-label": "Iterations done" });
    this.scores = el("div", { class: "held-out" });
    this.hacking = el("p", {});
    this.root = el("section", {}, el("h2", {}, "Progress"), this.facts, this.bar, this.pace, this.scores, this.hacking);
  }

  show(run, changed) {
    const of = run.iterations ? ` of ${run.iterations}` : "";
    const how = [run.objective, run.pipeline].filter(Boolean).join(" on ");
    setText(this.facts, [`Iteration ${run.step}${of}`, how, ago(run.updated)].filter(Boolean).join(", "));
    if (!changed && this.scores.childElementCount) return;
    this.bar.value = run.iterations ? Math.min(1, run.step / run.iterations) : 0;
    this.bar.hidden = !run.iterations;
    setText(this.pace, pace(run));
    this.scores.replaceChildren(...heldOut(run, 8));
    setText(this.hacking, run.hacking && `Iteration ${run.hacking_step}: ${run.hacking}`);
  }
}

// What a run does, how fast, and how long it still takes.
function pace(run) {
  const means = new Map(run.metrics);
  const seconds = (...names) => names.reduce((sum, name) => sum + (means.get(`time/${name}`)?.mean ?? 0), 0);
  const parts = { "drawing images": seconds("explore", "rollout"), scoring: seconds("explore_reward", "reward"), learning: seconds("train") };
  const total = Object.values(parts).reduce((a, b) => a + b, 0);
  const running = run.state === "running", left = run.iterations - run.step;
  if (!total) return running ? "It loads the model, or draws the base's held-out images: no iteration is done yet." : "";
  const shares = Object.entries(parts).map(([what, its]) => `${duration(its)} ${what}`).join(", ");
  const phase = !running ? "" : left > 0 ? "It trains: " : "It evaluates and saves what it has trained. ";
  const rest = running && left > 0 ? ` About ${duration(total * left)} left, evaluations not counted.` : "";
  return `${phase}${duration(total)} an iteration (${shares}).${rest}`;
}

function duration(seconds) {
  if (seconds < 90) return `${seconds < 10 ? Number(seconds.toPrecision(2)) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${Number((seconds / 3600).toPrecision(2))} h`;
}

// Files that a run has left, to keep, and the commands for what comes next.
class Results {
  constructor(name) {
    this.name = name;
    this.files = el("div", { class: "bar" });
    this.commands = el("pre", { tabindex: 0, "aria-label": "Commands" });
    this.root = el("section", { hidden: true }, el("h2", {}, "Results"), this.files, this.commands);
  }

  show(run, changed) {
    if (!changed && this.files.childElementCount) return;
    const names = Object.keys(run.results);
    this.root.hidden = !names.length;
    this.files.replaceChildren(...names.map((name) => el("button", {
      type: "button", class: "quiet", onclick: () => this.save(name, RESULTS[name]),
    }, `Save ${name} (${size(run.results[name])})`)));
    this.commands.hidden = !run.results.LoRA;
    setText(this.commands, `flowrl gallery ${run.path}\nflowrl export ${run.path} --to comfyui`);
  }

  async save(name, file) {
    await attempt(async () => {
      const address = await image(`/api/result?${new URLSearchParams({ run: this.name, name })}`);
      if (!address) throw new Error("the file is missing or cannot be read");
      el("a", { href: address, download: `${this.name.replaceAll("/", "-")}-${file}` }).click();
      setTimeout(() => URL.revokeObjectURL(address), 60_000);
    }, "Saved by the browser.");
  }
}

const RESULTS = { LoRA: "lora.safetensors", card: "README.md", gallery: "gallery.html" };
const size = (bytes) => (bytes < 1e6 ? `${Math.ceil(bytes / 1e3)} kB` : `${format(bytes / 1e6)} MB`);

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
