// Two ways to ask the package's own Python, behind one function: ask(kind, arguments) -> answer.
import { untouched } from "./settings.js";

const START = {
  server: async () => ({ words: "local server", ask: byServer }),
  pyodide: () => new Promise((resolve, reject) => {
    const worker = new Worker("worker.mjs", { type: "module" }), waiting = new Map();
    let count = 0;
    const ask = (text) => new Promise((done) => { waiting.set(count += 1, done); worker.postMessage([count, text]); });
    worker.onerror = (event) => reject(new Error(event.message || "Pyodide was not found beside this page"));
    worker.onmessage = ({ data }) => {
      if (data.failed) reject(new Error(data.failed));
      else if (data.python) resolve({ words: `Python ${data.python} in this page`, ask });
      else { waiting.get(data.id)(data.answer); waiting.delete(data.id); }
    };
  }),
};

async function byServer(text) {
  const got = await fetch("ask", { method: "POST", headers: { "Content-Type": "application/json" }, body: text });
  if (!got.ok) throw new Error(`the server answered ${got.status}`);
  return got.text();
}

// A static page brings the answers for its first settings along: it is drawn before Python has started.
const first = JSON.parse(document.getElementById("first")?.textContent || "{}");
const started = START[document.documentElement.dataset.engine]();
export const start = started.then(({ words }) => words);

export async function ask(kind, given = {}) {
  const known = first[`${kind} ${given.source ?? ""}`];
  if (known && (!given.settings || JSON.stringify(given.settings) === untouched)) return known;
  return JSON.parse(await (await started).ask(JSON.stringify({ ask: kind, ...given })));
}
