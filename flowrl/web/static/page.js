// Shows the view that the address names, and lets it ask for what is new while it is seen.

import { TOKEN, Refusal, forget } from "/ask.js";
import { compareView, listView } from "/lists.js";
import { el, setText, tell } from "/parts.js";
import { runView } from "/run.js";
import { startView } from "/start.js";

const POLL_MS = 1000;
const main = document.getElementById("main");
const views = { "": listView, run: runView, compare: compareView, start: startView };

let shown = null; // {view, stop: AbortController}
function trouble(text) {
  const place = document.getElementById("trouble");
  setText(place, text);
  place.hidden = !text;
}

// --- views

function wait(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(done, ms);
    function done() {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve();
    }
    signal.addEventListener("abort", done);
  });
}

function visible(signal) {
  return new Promise((resolve) => {
    const look = () => { if (!document.hidden || signal.aborted) resolve(); };
    if (!document.hidden) return resolve();
    document.addEventListener("visibilitychange", look, { signal });
    signal.addEventListener("abort", look);
  });
}

async function keepShowing(view, signal) {
  while (!signal.aborted) {
    let pause = POLL_MS;
    try {
      pause = (await view.update(signal)) ?? POLL_MS;
      trouble("");
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refusal && error.status === 401) return askForToken();
      trouble(error instanceof Refusal
        ? `${error.message}.` : "The server does not answer; trying again.");
    }
    await wait(pause, signal);
    await visible(signal);
  }
}

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: path, query: new URLSearchParams(query ?? "") };
}

function show(moved) {
  const { name, query } = route();
  leave();
  if (!sessionStorage.getItem(TOKEN)) return askForToken();
  const make = views[name] ?? listView;
  const stop = new AbortController();
  const view = make(query);
  shown = { view, stop };
  main.replaceChildren(view.root);
  document.title = `${view.title} - flowrl`;
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.getAttribute("href") === `#/${name}`;
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (moved) {
    window.scrollTo(0, 0);
    const heading = main.querySelector("h1");
    if (heading) { heading.tabIndex = -1; heading.focus(); }
  }
  keepShowing(view, stop.signal);
}

function leave() {
  if (shown) {
    shown.stop.abort();
    shown.view.leave?.();
  }
  shown = null;
  forget();
  trouble("");
  tell("");
}

function askForToken() {
  leave();
  sessionStorage.removeItem(TOKEN);
  const input = el("input", { type: "password", name: "token", required: true, autocomplete: "off" });
  const enter = (event) => {
    event.preventDefault();
    sessionStorage.setItem(TOKEN, input.value.trim());
    show(true);
  };
  main.replaceChildren(el("form", { class: "token", onsubmit: enter },
    el("h1", {}, "Open the address that flowrl ui printed"),
    el("p", {}, "It ends with a token, without which nothing is shown. Or enter the token here:"),
    el("label", {}, "Token", input),
    el("button", {}, "Show the runs")));
}

function takeToken() {
  const fragment = location.hash.match(/^#token=(.+)$/);
  if (!fragment) return;
  sessionStorage.setItem(TOKEN, decodeURIComponent(fragment[1]));
  history.replaceState(null, "", "#/"); // so that nobody reads it over a shoulder
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", () => {
  takeToken();
  show(true);
});
takeToken();
show(false);
