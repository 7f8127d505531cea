// Two images, five keys. A vote counts on the page once the server has written it.

import { get, send, image, TOKEN } from "./ask.js";

const KEYS = { 1: "first", 2: "second", t: "tie", s: "skip" };
const SMALL = 128; // pixels up to which an image is shown in hard pixels
const by = (id) => document.getElementById(id);
let shown = null; // the pair that is on the page
let busy = false; // until both images are loaded: nobody votes on an image unseen

function trouble(error) {
  by("trouble").textContent = error.message;
  by("trouble").hidden = false;
}

async function show(answer) {
  by("trouble").hidden = true;
  by("done").max = answer.goal;
  by("done").value = Math.min(answer.votes, answer.goal);
  by("progress").textContent = `${answer.votes} of ${answer.goal} votes` +
    (answer.votes >= answer.goal ? ": enough to train, or continue" : "");
  shown = answer.pair;
  by("prompt").textContent = shown ? shown.prompt : "No pairs are left";
  for (const name of ["first", "second"]) {
    const button = by(name);
    button.disabled = !shown;
    const picture = button.querySelector("img");
    if (picture.src) URL.revokeObjectURL(picture.src);
    picture.removeAttribute("src");
    if (!shown) continue;
    const address = await image(`/api/image?row=${shown[name]}`);
    if (address === null) { picture.alt = "This image cannot be shown: skip it"; continue; }
    picture.alt = name === "first" ? "First image" : "Second image";
    picture.onload = () => button.classList.toggle("small", picture.naturalWidth <= SMALL);
    picture.src = address;
  }
}

async function act(work) {
  if (busy) return;
  wait(true);
  try { await show(await work()); } catch (error) { trouble(error); } finally { wait(false); }
}

function wait(now) {
  busy = now;
  by("main").setAttribute("aria-busy", now);
}

const vote = (choice) => shown && act(() => send("/api/vote", { ...shown, choice }));
const undo = () => act(() => send("/api/undo", {}));

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  const choice = KEYS[event.key.toLowerCase()];
  if (choice) vote(choice);
  else if (event.key.toLowerCase() === "u") undo();
});
for (const button of document.querySelectorAll("[data-choice]")) {
  button.addEventListener("click", () => vote(button.dataset.choice));
}
by("undo").addEventListener("click", undo);

// --- training ---

let polling = null;

function report(answer) {
  const job = answer.job;
  by("training").hidden = !answer.possible;
  by("train").disabled = job?.exit === null;
  by("output").hidden = !job;
  if (!job) return;
  by("output").textContent = `${job.command}\n${job.output}`;
  by("output").scrollTop = by("output").scrollHeight;
  by("state").textContent = job.exit === null ? "Training" : job.exit === 0 ? "The LoRA is trained" : "Training failed";
  if (job.exit === null) polling = setTimeout(follow, 1000);
  else if (job.exit === 0) showGrid();
}

async function follow() {
  clearTimeout(polling);
  try { report((await get("/api/training")).data); } catch (error) { trouble(error); }
}

async function showGrid() {
  const address = await image("/api/grid");
  by("grid").hidden = address === null;
  if (address !== null) by("grid").querySelector("img").src = address;
}

by("train").addEventListener("click", async () => {
  try { report(await send("/api/train", {})); } catch (error) { trouble(error); }
});

const token = new URLSearchParams(location.hash.slice(1)).get("token");
if (token) {
  sessionStorage.setItem(TOKEN, token);
  history.replaceState(null, "", location.pathname);
}
act(async () => (await get("/api/next")).data);
follow();
