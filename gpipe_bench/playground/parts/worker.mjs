// The package's own Python in a worker, so that the page never waits: Pyodide, and a zip of the modules it needs.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const ready = (async () => {
  const [python, zip] = await Promise.all([loadPyodide(), fetch("gpipe_bench.zip").then((got) => got.arrayBuffer())]);
  python.unpackArchive(zip, "zip", { extractDir: "/package" });
  python.runPython("import sys; sys.path.insert(0, '/package')");
  const { ask } = python.pyimport("gpipe_bench.playground.questions");
  return { ask, version: python.runPython("sys.version.split()[0]") };
})();
ready.then(({ version }) => postMessage({ python: version }), (error) => postMessage({ failed: String(error) }));
onmessage = async ({ data: [id, question] }) => postMessage({ id, answer: (await ready).ask(question) });
