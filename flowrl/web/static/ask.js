// Requests with the token; answers are cached, so that what has not changed is not sent again.

export const TOKEN = "flowrl-token"; // in the storage of this tab
let answers = new Map(); // by path: {tag, data}, of the view that is shown

export class Refusal extends Error {
  constructor(status, text, field) {
    super(text);
    this.status = status;
    this.field = field; // of a form, whose value it refuses
  }
}

function request(path, options = {}) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(TOKEN) ?? ""}`, ...options.headers };
  return fetch(path, { ...options, headers, cache: "no-store" });
}

async function refusalOf(answer) {
  let content = {};
  try { content = await answer.json(); } catch { /* no JSON: the status says it */ }
  return new Refusal(answer.status, content.error ?? `the server answered ${answer.status}`, content.field);
}

// Returns what the server has now; `changed` is false when it is what was returned before.
export async function get(path, signal) {
  const cached = answers.get(path);
  const answer = await request(path, { signal, headers: cached ? { "If-None-Match": cached.tag } : {} });
  if (answer.status === 304) return { data: cached.data, changed: false };
  if (!answer.ok) throw await refusalOf(answer);
  const data = await answer.json();
  const tag = answer.headers.get("ETag");
  if (tag) {
    answers.delete(path);
    answers.set(path, { tag, data });
    if (answers.size > 8) answers.delete(answers.keys().next().value);
  }
  return { data, changed: true };
}

export async function send(path, content) {
  const headers = { "Content-Type": "application/json" };
  const answer = await request(path, { method: "POST", headers, body: JSON.stringify(content) });
  if (!answer.ok) throw await refusalOf(answer);
  return answer.json();
}

// Returns the address of a file within this page, null when the server has none to show.
export async function image(path, signal) {
  const answer = await request(path, { signal });
  if (answer.status === 404) return null;
  if (!answer.ok) throw await refusalOf(answer);
  return URL.createObjectURL(await answer.blob());
}

export function forget() {
  answers = new Map();
}
