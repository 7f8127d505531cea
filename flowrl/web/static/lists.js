// The list of runs, and their comparison.

import { get } from "/ask.js";
import { format } from "/chart.js";
import { Curves, ago, attempt, el, heldOut, runLink, setText, stateBadge, table } from "/parts.js";

const MOST_COMPARED = 20; // runs, until somebody chooses

function compareLink(names) {
  return `#/compare?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`;
}

// --- runs

class RunRow {
  constructor(name, onChoice) {
    this.check = el("input", { type: "checkbox", "aria-label": `Compare ${name}`, onchange: onChoice });
    this.state = el("td", { "data-label": "State" });
    this.steps = el("td", { "data-label": "Iterations", class: "number" });
    this.held = el("td", { "data-label": "Held-out" });
    this.reward = el("td", { "data-label": "Reward", class: "number" });
    this.changed = el("td", { "data-label": "Changed" });
    this.root = el("tr", {},
      el("td", { class: "pick" }, this.check),
      el("th", { scope: "row" }, el("a", { href: runLink(name) }, name)),
      this.state, this.steps, this.held, this.reward, this.changed);
    this.shown = "";
  }

  show(run) {
    const now = JSON.stringify(run) + ago(run.updated);
    if (now === this.shown) return;
    this.shown = now;
    this.state.replaceChildren(stateBadge(run));
    this.steps.textContent = run.iterations ? `${run.step} of ${run.iterations}` : String(run.step);
    this.held.replaceChildren(...heldOut(run));
    this.reward.textContent = run.reward === null ? "" : format(run.reward);
    this.changed.textContent = ago(run.updated);
  }
}

export function listView() {
  const rows = new Map();
  const compare = el("a", { class: "button", href: "#/compare" }, "Compare all");
  const filter = el("input", { type: "search", autocomplete: "off", oninput: hide });
  const body = el("tbody", {});
  const place = el("div", { hidden: true },
    el("div", { class: "bar" }, el("label", { class: "inline" }, "Filter", filter), compare),
    el("div", { class: "wide" }, el("table", { class: "cards" },
      el("caption", { class: "hidden" }, "Runs, those that changed last first"),
      el("thead", {}, el("tr", {}, ["", "Run", "State", "Iterations", "Held-out", "Reward", "Changed"]
        .map((name) => el("th", { scope: "col" }, name || el("span", { class: "hidden" }, "Compare"))))),
      body)));
  const empty = el("p", {}, "Reading the folder...");
  const heading = el("h1", {}, "Runs");

  function hide() {
    const wanted = filter.value.trim().toLowerCase();
    for (const [name, row] of rows) row.root.hidden = !name.toLowerCase().includes(wanted);
  }

  function choose() {
    const chosen = [...rows].filter(([, row]) => row.check.checked).map(([name]) => name);
    compare.href = chosen.length ? compareLink(chosen) : "#/compare";
    compare.textContent = chosen.length ? `Compare ${chosen.length} chosen` : "Compare all";
  }

  async function update(signal) {
    const { data, changed } = await get("/api/runs", signal);
    if (changed) {
      for (const name of [...rows.keys()]) {
        if (!data.runs.some((run) => run.run === name)) { rows.get(name).root.remove(); rows.delete(name); }
      }
      for (const run of data.runs) {
        if (rows.has(run.run)) continue;
        const row = new RunRow(run.run, choose);
        rows.set(run.run, row);
        body.append(row.root);
      }
      hide();
    }
    for (const run of data.runs) rows.get(run.run).show(run);
    place.hidden = !data.runs.length;
    empty.hidden = data.runs.length > 0;
    setText(empty, "This folder has no runs yet. Train one with flowrl train quickstart, or on the page Start.");
  }

  return { title: "Runs", root: el("div", {}, heading, empty, place), update };
}

// --- comparison

export function compareView(query) {
  const chosen = query.getAll("run");
  const root = el("div", {}, el("h1", {}, "Compare runs"));
  const legend = el("ul", { class: "legend", "aria-label": "Runs" });
  const values = el("div", {});
  const difference = el("div", {});
  const [one, other] = [0, 1].map(() => el("select", { onchange: showDifference }));
  let curves = null, names = [], wake = 0;

  function build(runs) {
    names = runs.map((run) => run.run);
    curves = new Curves(names, () => { wake += 1; });
    const options = () => names.map((name) => el("option", { value: name }, name));
    one.replaceChildren(...options());
    other.replaceChildren(...options());
    if (names.length > 1) other.value = names[1];
    legend.replaceChildren(...runs.map((run, index) => el("li", {},
      el("span", { class: `key c${index % 8} dash${Math.floor(index / 8) % 3}` }),
      el("a", { href: runLink(run.run) }, run.run))));
    root.append(legend, curves.held, curves.root, el("h2", {}, "Held-out scores"), values,
      el("h2", {}, "Recipes"),
      el("div", { class: "bar" }, el("label", { class: "inline" }, "Run", one),
        el("label", { class: "inline" }, "against", other)), difference);
    showDifference();
  }

  async function showDifference() {
    await attempt(async () => difference.replaceChildren(await differenceTable(one.value, other.value)));
  }

  async function update(signal) {
    const { data, changed } = await get("/api/runs", signal);
    const runs = chosen.length
      ? chosen.map((name) => data.runs.find((run) => run.run === name)).filter(Boolean)
      : data.runs.slice(0, MOST_COMPARED);
    if (!runs.length) {
      setText(root.querySelector("h1"), "Compare runs: this folder has none");
      return null;
    }
    if (!curves) build(runs);
    if (changed) values.replaceChildren(table("Mean scores of held-out prompts: before training, and last",
      ["Run", "State", "Iteration", "Scores"],
      runs.map((run) => [run.run, stateBadge(run), String(run.held_out_step ?? ""), el("div", {}, heldOut(run, 8))])));
    const before = wake;
    const current = curves.take((await get(curves.path(), signal)).data);
    return current && before === wake ? null : 0;
  }

  return { title: "Compare", root, update, leave: () => curves?.leave() };
}

export async function differenceTable(one, other) {
  if (one === other) return el("p", { class: "muted" }, "Choose two different runs.");
  const query = new URLSearchParams({ run: one, other });
  const { data } = await get(`/api/recipe?${query}`);
  if (data.without.length) return el("p", {}, `No recipe is saved in ${data.without.join(" and ")}.`);
  if (!data.differences.length) return el("p", {}, "Their recipes are the same.");
  return table(`Options in which ${one} and ${other} differ`, ["Option", one, other],
    data.differences.map((line) => [line.option, el("code", {}, line.one), el("code", {}, line.other)]));
}
