// The form that starts a run, and the commands that this page has started.

import { get, send } from "/ask.js";
import { attempt, el, runLink, setText, tell } from "/parts.js";

const OWN = "own"; // the choice of a reward that is not built in

class Form {
  constructor() {
    this.faults = {};
    this.inputs = {};
    this.recipes = new Map();
    this.rewards = {};
    const text = (name, list) => el("input", { name, list, autocomplete: "off", spellcheck: "false" });
    const lists = ["models", "presets"].map((id) => el("datalist", { id }));
    this.lists = { models: lists[0], presets: lists[1] };
    this.target = text("target");
    this.target.hidden = true;
    this.target.placeholder = "my_rewards:Sharpness";
    this.target.setAttribute("aria-label", "Your own reward, as module:Class");
    const more = el("details", {}, el("summary", {}, "More options"),
      this.field("changes", "Changes of options, one KEY=VALUE per line",
        el("textarea", { rows: 3, spellcheck: "false", placeholder: "optim.lr=5e-4" })));
    this.general = el("p", { class: "fault", role: "alert" });
    this.root = el("form", { class: "start", novalidate: true, onsubmit: (event) => this.submit(event) },
      this.field("model", "Model: a name below, a folder, or a name on the Hub", text("model", "models")),
      this.field("prompts", "Prompts, one a line", el("textarea", { rows: 4, spellcheck: "false" }),
        "At least 8; a tenth, at least 4, is held out to measure on. Empty: the recipe's own."),
      this.field("prompt_file", "or a file of prompts on this machine (.txt, .jsonl, .csv)", text("prompt_file")),
      this.field("reward", "Reward", el("select", { onchange: () => this.hint() })), this.target,
      this.field("recipe", "Recipe whose method it takes: a preset, or a YAML file", text("recipe", "presets")),
      this.field("iterations", "Iterations", el("input", { type: "number", min: 1, max: 9999999, inputmode: "numeric" }),
        "Empty: as many as the recipe says."),
      this.field("folder", "Name of the run", text("folder"), "Its folder, beside the other runs. Needed to start."),
      more, this.general,
      el("div", { class: "bar" },
        el("button", { value: "plan", class: "quiet" }, "Plan"),
        el("button", { value: "rehearse", class: "quiet" }, "Dry run"),
        el("button", { value: "start" }, "Start")),
      el("p", { class: "muted" }, "Plan: hours and memory. Dry run: a minute of it on a small random model. ",
        "Start: train on this machine, in one process."), lists);
    this.inputs.recipe.value = "quickstart";
    this.inputs.recipe.addEventListener("input", () => this.hint());
    this.more = more;
  }

  field(name, label, input, hint = "") {
    const note = el("p", { class: "muted", id: `${name}-hint` }, hint);
    this.faults[name] = el("p", { class: "fault", id: `${name}-fault` });
    input.name = name;
    input.setAttribute("aria-describedby", `${name}-hint ${name}-fault`);
    this.inputs[name] = input;
    return el("div", {}, el("label", {}, label, input), note, this.faults[name]);
  }

  async load(signal) {
    if (this.recipes.size) return;
    const { data } = await get("/api/choices", signal);
    this.recipes = new Map(data.recipes.map((one) => [one.name, one]));
    this.rewards = data.rewards;
    const options = (names) => names.map((name) => el("option", { value: name }));
    this.lists.models.append(...options(data.models));
    this.lists.presets.append(...options([...this.recipes.keys()]));
    this.inputs.reward.append(el("option", { value: "" }, "the recipe's own"),
      ...Object.keys(data.rewards).map((name) => el("option", { value: name }, name)),
      el("option", { value: OWN }, "my own, as module:Class"));
    this.hint();
  }

  // Says what the chosen recipe is, and what the chosen reward needs.
  hint() {
    const note = (name, words) => setText(this.root.querySelector(`#${name}-hint`), words);
    const recipe = this.recipes.get(this.inputs.recipe.value.trim());
    const reward = this.inputs.reward.value;
    note("recipe", recipe?.about ?? "");
    note("model", recipe ? `Empty: ${recipe.model}, the recipe's own.` : "Empty: the recipe's own.");
    note("reward", Object.hasOwn(this.rewards, reward) ? `${this.rewards[reward]}.` : "");
    this.target.hidden = reward !== OWN;
  }

  async submit(event) {
    event.preventDefault();
    const action = event.submitter?.value ?? "plan";
    const order = Object.fromEntries(Object.entries(this.inputs).map(([name, input]) => [name, input.value.trim()]));
    order.changes = order.changes.split("\n");
    if (order.reward === OWN) order.reward = this.target.value.trim() || OWN;
    for (const [name, input] of Object.entries(this.inputs)) {
      setText(this.faults[name], "");
      input.removeAttribute("aria-invalid");
    }
    setText(this.general, "");
    tell("");
    try {
      await send(`/api/${action}`, order);
      tell(`${{ plan: "Planning", rehearse: "Dry run", start: "Started" }[action]}: see below.`);
    } catch (error) {
      this.refuse(error);
    }
  }

  refuse(error) {
    const place = this.faults[error.field] ?? this.general;
    setText(place, `${error.message}.`.replace(/\.\.$/, "."));
    if (place === this.general) return;
    const input = error.field === "reward" && !this.target.hidden ? this.target : this.inputs[error.field];
    if (error.field === "changes") this.more.open = true;
    this.inputs[error.field].setAttribute("aria-invalid", "true");
    input.focus();
  }
}

export function startView() {
  const form = new Form();
  const list = el("div", { class: "jobs" });
  const cards = new Map();
  const none = el("p", { class: "muted" }, "None yet.");
  list.append(none);
  const root = el("div", {}, el("h1", {}, "Start a run"), form.root,
    el("h2", {}, "Commands of this page"), list);

  async function update(signal) {
    await form.load(signal);
    const { data } = await get("/api/jobs", signal);
    none.hidden = data.jobs.length > 0;
    const current = new Set(data.jobs.map((job) => job.job));
    for (const [name, card] of cards) {
      if (!current.has(name)) { card.root.remove(); cards.delete(name); }
    }
    for (const job of [...data.jobs].reverse()) {
      if (!cards.has(job.job)) {
        cards.set(job.job, new JobCard(job));
        list.prepend(cards.get(job.job).root);
      }
      cards.get(job.job).show(job);
    }
  }

  return { title: "Start", root, update };
}

class JobCard {
  constructor(job) {
    this.name = job.job;
    this.state = el("span", { class: "state" });
    this.output = el("pre", { tabindex: 0, "aria-label": `Output of ${job.kind} ${job.title}` });
    this.end = el("button", { type: "button", class: "quiet", onclick: () => this.stop() }, "Stop");
    this.link = el("a", { class: "button", hidden: true, href: runLink(job.title) }, "Open the run");
    this.root = el("section", { class: "card", "aria-label": `${job.kind} ${job.title}` },
      el("h3", {}, `${job.kind} ${job.title} `, this.state),
      el("p", {}, el("code", {}, job.command)), this.output,
      el("div", { class: "bar" }, this.link, this.end));
  }

  show(job) {
    const failed = job.exit !== null && job.exit !== 0;
    setText(this.state, job.exit === null ? "running" : failed ? `failed (${job.exit})` : "done");
    this.state.className = `state ${job.exit === null ? "running" : failed ? "failed" : "finished"}`;
    const { scrollTop, clientHeight, scrollHeight } = this.output;
    setText(this.output, job.output);
    this.output.hidden = !job.output;
    if (scrollTop + clientHeight > scrollHeight - 9) this.output.scrollTop = this.output.scrollHeight;
    this.link.hidden = !job.run;
    this.end.hidden = job.exit !== null;
  }

  async stop() {
    await attempt(() => send("/api/stop", { job: this.name }), "Stopping.");
  }
}
