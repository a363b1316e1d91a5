// The controls of the page, and the link that holds what they say.
const controls = document.getElementById("controls");
const TIMES = ["forward", "inputs", "weights"];
export const fields = [...controls.elements].filter((one) => one.name);
export const fieldFor = Object.fromEntries(fields.map((field) => [field.name, field]));
const initial = Object.fromEntries(fields.map((field) => [field.name, field.value]));
const numbers = (text) => text.trim().split(/[\s,;]+/);

export const sliderOf = (field) => (field.nextElementSibling?.type === "range" ? field.nextElementSibling : null);

function read(field) {
  if (TIMES.includes(field.name)) return numbers(field.value).map(Number);
  return field.tagName === "SELECT" ? field.value : Number(field.value);
}
export const settings = () => Object.fromEntries(fields.map((field) => [field.name, read(field)]));
export const untouched = JSON.stringify(settings());

export function put(name, value) {
  const field = fieldFor[name], slider = sliderOf(field);
  field.value = value;
  if (slider) [slider.value] = numbers(String(value));
}

// A list of times is for its number of stages alone: with other stages its first value is that of all.
export function onePerStage() {
  for (const name of TIMES) put(name, numbers(fieldFor[name].value)[0]);
}

export function markWrong(problem) {
  for (const field of fields) field.classList.toggle("bad", problem.startsWith(`${field.name} `));
}

// A change of a slider or a field, once both say the same.
export function onChange(changed) {
  controls.addEventListener("input", ({ target }) => {
    const field = target.type === "range" ? target.previousElementSibling : target, slider = sliderOf(field);
    if (target === slider) field.value = slider.value;
    else if (slider) [slider.value] = numbers(field.value);
    if (field.name === "p") onePerStage();
    changed(field.name);
  });
  controls.addEventListener("submit", (event) => event.preventDefault());
}

const bytesOf = async (stream) => new Uint8Array(await new Response(stream).arrayBuffer());
async function pack(text) {
  const packed = await bytesOf(new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw")));
  return btoa(String.fromCharCode(...packed)).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
}
async function unpack(text) {
  const raw = Uint8Array.from(atob(text.replace(/-/g, "+").replace(/_/g, "/")), (one) => one.charCodeAt(0));
  return new TextDecoder().decode(await bytesOf(new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate-raw"))));
}

// The link has the settings that differ, the schedule that is shown, and one's own schedule.
export async function writeLink(shown, own) {
  const differing = fields.filter((field) => field.value !== initial[field.name]);
  const said = new URLSearchParams(differing.map((field) => [field.name, field.value]));
  if (shown !== "1f1b") said.set("show", shown);
  if (own) said.set("own", await pack(own));
  history.replaceState(null, "", `#${said}`);
}
export async function readLink() {
  const said = new URLSearchParams(location.hash.slice(1));
  for (const field of fields) put(field.name, said.get(field.name) ?? initial[field.name]);
  const found = { shown: said.get("show") || "1f1b", own: null, problem: "" };
  try {
    if (said.get("own")) found.own = await unpack(said.get("own"));
  } catch {
    found.problem = "The schedule in the link cannot be read; copy the whole link.";
  }
  return found;
}
