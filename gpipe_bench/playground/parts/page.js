// Asks Python and shows its answers. State: the shown source, one's own schedule (CSV), its history, what is chosen.
import { actions, colours, drawPlot, drawStep, words } from "./drawing.js";
import { ask, start } from "./engine.js";
import { fieldFor, markWrong, onChange, onePerStage, put, readLink, settings, writeLink } from "./settings.js";

const $ = (id) => document.getElementById(id), big = $("big");
const digits = (value) => Number(value.toPrecision(4)).toString(), percent = (value) => `${(100 * value).toFixed(1)} %`;
const state = { shown: "1f1b", own: null, past: [], names: [], steps: {}, summary: { front: [] }, named: [], cards: {} };
const element = (tag, more = {}, ...inside) => { const made = Object.assign(document.createElement(tag), more); made.append(...inside); return made; };
const sourceOf = (name) => (name === "yours" ? state.own : name);
const shownStep = () => { const step = state.steps[state.shown]; return step && !step.problems ? step : null; };
const question = (kind, more = {}) => ask(kind, { source: sourceOf(state.shown), settings: settings(), ...more });
const limit = () => Number(fieldFor.limit.value);
const forget = () => Object.assign(state, { chosen: null, arrows: null, view: null });

// ---- asking: one step after the other, so that the first is drawn at once; new settings end the old round
let round = 0;
async function redraw() {
  const mine = (round += 1), now = settings(), began = performance.now(), found = {};
  if (!state.own && state.shown === "yours") state.shown = "1f1b";
  const names = [...(state.own ? ["yours"] : []), ...state.names];
  if (!names.includes(state.shown)) state.shown = "1f1b";
  for (const name of [state.shown, ...names.filter((one) => one !== state.shown)]) {
    const step = await ask("step", { source: sourceOf(name), settings: now });
    if (mine !== round) return;
    found[name] = state.steps[name] = step;
    if (name === state.shown) { drawBig(); document.body.dataset.first = Math.round(performance.now() - began); }
  }
  const good = names.filter((name) => !found[name].problems);
  const keys = Object.fromEntries(good.map((name) => [sourceOf(name), name]));
  const got = await ask("summary", { sources: good.map(sourceOf), settings: now });
  if (mine !== round) return;
  state.steps = found;
  state.summary = good.length ? { best: keys[got.best], front: got.front.map((one) => keys[one]), least: keys[got.least] } : { front: [] };
  markWrong(good.length ? "" : Object.values(found)[0].problems[0]);
  drawAll();
  await writeLink(state.shown, state.own);
  document.body.dataset.drawn = Number(document.body.dataset.drawn || 0) + 1;
  document.body.dataset.ms = Math.round(performance.now() - began);
}

// ---- words
function say(text, refused = false) {
  $("reason").textContent = text;
  $("reason").classList.toggle("refused", refused);
  state.named = refused ? [...text.matchAll(/([FRBIW])\((\d+),(\d+)\)/g)].map(([, kind, i, j]) => `${kind},${i},${j}`) : [];
}
function refuse(problem) {
  say(`Refused: ${problem}`, true);
  state.arrows = null;
  $("focus").classList.remove("shake");
  void $("focus").offsetWidth; // starts the animation again
  $("focus").classList.add("shake");
  drawBig();
}
function facts(step) {
  const over = step.fits ? "" : "over", memory = step.fits ? " activations" : ` activations, limit ${digits(limit())}`;
  return [element("b", { textContent: digits(step.makespan) }), " time, ", element("b", { textContent: percent(step.bubble) }), " bubble, ",
    element("b", { textContent: digits(step.peak), className: over }), element("span", { textContent: memory, className: over })];
}
function answer() {
  const { best, least } = state.summary, steps = state.steps, most = digits(limit());
  if (!least) return [];
  if (!best) return [`No schedule fits ${most} activations; `, element("b", { textContent: least }), ` needs least, ${digits(steps[least].peak)}.`];
  const { makespan, bubble } = steps[best], base = steps["1f1b"], beside = best === "1f1b" || base.problems ? "" : `, ${(base.makespan / makespan).toFixed(2)} × the speed of 1f1b`;
  return [element("b", { textContent: best }), ` is the fastest that fits ${most} activations: ${digits(makespan)}${beside}, bubble ${percent(bubble)}.`];
}

// ---- drawing
function placeOf(key) { // "kind,i,j" -> its box
  const [kind, i, j] = key.split(",");
  for (const [device, row] of shownStep().rows.entries()) {
    const k = row.i.findIndex((one, at) => row.kinds[at] === kind && one === Number(i) && row.j[at] === Number(j));
    if (k >= 0) return { device, k };
  }
  return null;
}
const edgeOf = (row, slot) => (slot < row.kinds.length ? row.start[slot] : row.end.at(-1) ?? 0);
function drawBig() {
  const step = state.steps[state.shown], good = shownStep();
  $("facts").replaceChildren(...(good ? facts(good) : []));
  if (!step) return;
  if (!good) { state.at = null; big.width = big.width; say(step.problems[0], true); return; } // eslint-disable-line no-self-assign
  const many = step.rows.length > 8, colour = colours();
  const look = { colour, lane: many ? 17 : 26, gap: 5, memory: many ? 8 : 13, left: 22, axis: true, limit: limit(), most: Math.max(limit(), step.peak) };
  const at = state.at = drawStep(big, step, { ...look, view: state.view || { from: 0, to: step.makespan || 1 } }), { pen } = at;
  const box = ({ device, k }) => ({ x: at.x(step.rows[device].start[k]), end: at.x(step.rows[device].end[k]), y: at.top(device), h: at.lane });
  pen.save();
  pen.beginPath();
  pen.rect(at.left - 4, 0, at.right - at.left + 8, step.rows.length * at.pitch);
  pen.clip();
  const outline = (spot, stroke, width) => {
    const b = box(spot);
    Object.assign(pen, { strokeStyle: stroke, lineWidth: width });
    pen.beginPath();
    pen.roundRect(b.x, b.y, Math.max(b.end - b.x - 1, 2), b.h, 3);
    pen.stroke();
  };
  const arrow = (one, other, stroke) => {
    if (one.device === other.device) return; // its outline says it
    const a = box(one), b = box(other), y = a.y + a.h / 2, goal = b.y + b.h / 2;
    Object.assign(pen, { strokeStyle: stroke, fillStyle: stroke, lineWidth: 1.6 });
    pen.beginPath();
    pen.moveTo(a.end - 1, y);
    pen.bezierCurveTo(a.end + 16, y, b.x - 16, goal, b.x, goal);
    pen.stroke();
    pen.beginPath();
    pen.arc(b.x, goal, 2.6, 0, 7);
    pen.fill();
  };
  const { drag, arrows, chosen } = state;
  if (chosen && chosen.k < step.rows[chosen.device].kinds.length) {
    if (arrows && !drag) {
      for (const from of arrows.before.map(placeOf).filter(Boolean)) { outline(from, colour.ink, 1.5); arrow(from, chosen, colour.ink); }
      for (const to of arrows.after.map(placeOf).filter(Boolean)) arrow(chosen, to, colour.accent);
    }
    outline(chosen, colour.ink, 2.5);
  }
  if (drag?.moving) drawDrag(pen, at, step, drag, colour, box(drag));
  for (const spot of state.named.map(placeOf).filter(Boolean)) outline(spot, colour.bad, 2.5);
  pen.restore();
}
function drawDrag(pen, at, step, drag, colour, box) {
  const row = step.rows[drag.device];
  if (drag.reach) { // where the checker lets it go
    const [a, b] = drag.reach.map((slot) => at.x(edgeOf(row, slot)));
    pen.fillStyle = colour.accent;
    pen.fillRect(a - 1, at.top(drag.device) + at.lane, b - a + 2, 3);
  }
  const goal = at.x(edgeOf(step.rows[drag.over], drag.slot));
  const legal = drag.over === drag.device && (!drag.reach || (drag.slot >= drag.reach[0] && drag.slot <= drag.reach[1]));
  pen.fillStyle = legal ? colour.accent : colour.bad;
  pen.fillRect(goal - 1.5, at.top(drag.over) - 3, 3, at.lane + 6);
  pen.globalAlpha = 0.8;
  pen.fillStyle = actions[row.kinds[drag.k]];
  pen.beginPath();
  pen.roundRect(box.x + drag.dx, box.y + drag.dy, box.end - box.x - 1, box.h, 3);
  pen.fill();
  pen.globalAlpha = 1;
}
function drawCards() {
  const order = $("order").value, good = (name) => state.steps[name] && !state.steps[name].problems;
  const names = Object.keys(state.cards).filter((name) => name !== "yours" || state.own);
  if (order !== "listed") names.sort((a, b) => (good(a) ? state.steps[a][order] : 1e9) - (good(b) ? state.steps[b][order] : 1e9));
  if ([...$("list").children].map((card) => card.dataset.name).join() !== names.join()) $("list").replaceChildren(...names.map((name) => state.cards[name].card));
  const shown = names.filter(good), longest = Math.max(...shown.map((name) => state.steps[name].makespan), 1e-9), colour = colours();
  const most = Math.max(...shown.map((name) => state.steps[name].peak), 1e-9);
  for (const name of names) {
    const { card, tag, words: said, canvas } = state.cards[name], step = state.steps[name];
    card.setAttribute("aria-pressed", name === state.shown);
    if (!step) continue;
    tag.textContent = name === state.summary.best ? "fastest that fits" : "";
    card.classList.toggle("large", !step.problems && !step.fits);
    said.replaceChildren(...(step.problems ? [element("span", { textContent: step.problems[0], className: "over" })] : facts(step)));
    canvas.hidden = Boolean(step.problems);
    const lane = step.problems || step.rows.length <= 8 ? 10 : 6;
    if (!step.problems) drawStep(canvas, step, { colour, lane, gap: 2, memory: lane / 2, most, view: { from: 0, to: longest } });
  }
}
function drawAll() {
  $("answer").replaceChildren(...answer());
  $("undo").disabled = !state.past.length;
  const names = [...(state.own ? ["yours"] : []), ...state.names];
  if ([...$("shown").options].map((one) => one.value).join() !== names.join()) $("shown").replaceChildren(...names.map((name) => new Option(name)));
  $("shown").value = state.shown;
  drawBig();
  drawCards();
  drawPlot($("plot"), state.steps, state.summary.front, state.shown, limit());
}

// ---- choosing and changing
const rowOf = (device) => shownStep()?.rows[device];
const keyOf = (row, k) => [row.kinds[k], row.i[k], row.j[k]];
// R comes with checkpoints and is no part of the schedule: positions for Python are counted without it, and back.
const plainBefore = (row, k) => [...row.kinds.slice(0, k)].filter((kind) => kind !== "R").length;
const slotOf = (row, plain) => { let k = 0; for (let seen = 0; k < row.kinds.length && seen < plain; k += 1) seen += row.kinds[k] !== "R"; return k; };
async function choose(spot) {
  state.chosen = spot;
  state.arrows = null;
  if (!spot) return drawBig();
  const row = rowOf(spot.device), [kind, i, j] = keyOf(row, spot.k), idle = row.start[spot.k] - (spot.k ? row.end[spot.k - 1] : 0);
  const times = `${digits(row.start[spot.k])} to ${digits(row.end[spot.k])}${idle > 1e-6 ? `, after ${digits(idle)} idle` : ""}`;
  say(`${kind}(${i},${j}): ${words[kind]} of micro-batch ${i}, partition ${j}; ${times}; device ${spot.device} then holds ${digits(row.after[spot.k])}`);
  drawBig();
  const got = await question("why", { action: [kind, i, j] });
  if (state.chosen !== spot || got.problems) return undefined;
  state.arrows = { before: got.before.map(String), after: got.after.map(String) };
  return drawBig();
}
async function take(csv, key, done) { // a changed schedule becomes one's own; key: the action that stays chosen
  const before = shownStep()?.makespan;
  state.past.push([state.own, state.shown]);
  Object.assign(state, { own: csv, shown: "yours", arrows: null, chosen: null });
  await redraw();
  const now = shownStep();
  if (!now) return;
  if (key) state.chosen = placeOf(key);
  const gain = now.makespan - before;
  say(`${done}. ${Math.abs(gain) < 1e-6 ? "The step takes as long as before" : `The step is ${digits(Math.abs(gain))} ${gain < 0 ? "shorter" : "longer"}`}: ${digits(now.makespan)}.`);
  drawBig();
  await fillText();
}
async function move(spot, device, slot) {
  const row = rowOf(spot.device), key = String(keyOf(row, spot.k));
  if (row.kinds[spot.k] === "R") return refuse("a recomputation comes with its checkpoint, right before the backward pass; move that");
  const from = plainBefore(row, spot.k), to = plainBefore(rowOf(device), slot) - (device === spot.device && slot > spot.k ? 1 : 0);
  if (device === spot.device && from === to) return drawBig();
  const got = await question("move", { place: [spot.device, from], to: [device, to] });
  return got.problems ? refuse(got.problems[0]) : take(got.csv, key, "Moved");
}
async function exchange() {
  const [one, other, passes] = ["one", "other", "passes"].map((name) => $("exchange").querySelector(`[name=${name}]`).value);
  const got = await question("exchange", { one: Number(one), other: Number(other), passes });
  return got.problems ? refuse(got.problems[0]) : take(got.csv, null, `Exchanged ${one} and ${other}`);
}
async function undo() {
  if (!state.past.length) return;
  [state.own, state.shown] = state.past.pop();
  state.chosen = state.arrows = null;
  say("Taken back.");
  await redraw();
  await fillText();
}
async function show(name) {
  if (name === state.shown) return;
  forget();
  state.shown = name;
  say("");
  drawAll();
  await writeLink(state.shown, state.own);
  await fillText();
}
async function fillText() { // the text is asked for where it can be seen
  if ($("text").open) $("csv").value = (await question("csv")).csv || "";
}
async function takeText(text) {
  const got = await ask("read", { text });
  if (got.problems) return refuse(got.problems[0]);
  state.past.push([state.own, state.shown]);
  forget();
  Object.assign(state, { own: got.csv, shown: "yours" });
  if (Number(fieldFor.p.value) !== got.p) onePerStage();
  put("p", got.p);
  put("m", got.m);
  say(`A schedule for ${got.p} devices and ${got.m} micro-batches; it can run.`);
  return redraw();
}

// ---- pointer, wheel and keys
function spotAt(x, y) {
  const at = state.at, device = at && Math.floor(y / at.pitch), row = at && rowOf(device);
  if (!row) return null;
  const time = at.time(x), slack = at.time(x + 2) - time;
  return { device, k: row.start.findIndex((from, n) => time >= from - slack && time <= row.end[n] + slack && row.end[n] > from) };
}
big.addEventListener("pointerdown", (event) => {
  const spot = spotAt(event.offsetX, event.offsetY);
  if (!spot) return;
  big.setPointerCapture(event.pointerId);
  const { from, to } = state.view || { from: 0, to: shownStep().makespan };
  state.drag = { ...spot, x: event.offsetX, y: event.offsetY, dx: 0, dy: 0, from, to, over: spot.device, slot: spot.k };
  choose(spot.k >= 0 ? { device: spot.device, k: spot.k } : null);
});
big.addEventListener("pointermove", (event) => {
  const { drag, at } = state;
  if (!drag) { big.classList.toggle("hand", spotAt(event.offsetX, event.offsetY)?.k >= 0); return; }
  drag.dx = event.offsetX - drag.x;
  drag.dy = event.offsetY - drag.y;
  if (drag.k < 0) { const by = at.time(drag.x) - at.time(event.offsetX); look(drag.from + by, drag.to + by); return; }
  if (!drag.moving && Math.hypot(drag.dx, drag.dy) > 5) startDrag(drag);
  const rows = shownStep().rows, time = at.time(event.offsetX);
  drag.over = Math.min(Math.max(Math.floor(event.offsetY / at.pitch), 0), rows.length - 1);
  const after = rows[drag.over].start.findIndex((from, k) => (from + rows[drag.over].end[k]) / 2 > time);
  drag.slot = after < 0 ? rows[drag.over].kinds.length : after;
  drawBig();
});
async function startDrag(drag) {
  const row = rowOf(drag.device);
  drag.moving = true;
  big.classList.add("drag");
  if (row.kinds[drag.k] === "R") return;
  const got = await question("reach", { place: [drag.device, plainBefore(row, drag.k)] });
  if (got.problems || state.drag !== drag) return;
  drag.reach = [slotOf(row, got.first), slotOf(row, got.last + 1)];
  big.dataset.reach = drag.reach.join();
  drawBig();
}
function drop(event) {
  const { drag } = state;
  state.drag = null;
  delete big.dataset.reach;
  big.classList.remove("drag");
  if (drag?.moving && event.type === "pointerup") move(drag, drag.over, drag.slot); else drawBig();
}
big.addEventListener("pointerup", drop);
big.addEventListener("pointercancel", drop);
function look(from, to) {
  const whole = shownStep()?.makespan;
  if (!whole) return;
  const long = Math.min(Math.max(to - from, whole / 60), whole), begin = Math.min(Math.max(from, 0), whole - long);
  state.view = long >= whole ? null : { from: begin, to: begin + long };
  drawBig();
}
function zoom(factor, centre) {
  const { from, to } = state.view || { from: 0, to: shownStep()?.makespan }, c = centre ?? (from + to) / 2;
  look(c - (c - from) / factor, c + (to - c) / factor);
}
big.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoom(1.25 ** -Math.sign(event.deltaY), state.at.time(event.offsetX));
}, { passive: false });
function step(by, lanes) {
  const { rows } = shownStep(), now = state.chosen || { device: 0, k: -1 };
  if (!lanes) return choose({ device: now.device, k: Math.min(Math.max(now.k + by, 0), rows[now.device].kinds.length - 1) });
  const device = Math.min(Math.max(now.device + by, 0), rows.length - 1), time = rows[now.device].start[Math.max(now.k, 0)];
  const nearest = rows[device].start.reduce((best, from, n) => (Math.abs(from - time) < Math.abs(rows[device].start[best] - time) ? n : best), 0);
  return choose({ device, k: nearest });
}
function shove(key) { // the chosen action by one place, or to the next device
  const { device, k } = state.chosen, row = rowOf(device);
  if (key === "ArrowUp" || key === "ArrowDown") {
    const other = device + (key === "ArrowUp" ? -1 : 1), target = rowOf(other);
    return target && move(state.chosen, other, Math.min(k, target.kinds.length));
  }
  let slot = key === "ArrowLeft" ? k - 1 : k + 2;
  while (key === "ArrowLeft" && slot > 0 && row.kinds[slot - 1] === "R") slot -= 1; // past the recomputation that belongs to it
  return slot >= 0 && slot <= row.kinds.length && move(state.chosen, device, slot);
}
function shift(by) {
  const names = [...$("shown").options].map((one) => one.value);
  return show(names[(names.indexOf(state.shown) + by + names.length) % names.length]);
}
const KEYS = {
  ArrowLeft: () => step(-1), ArrowRight: () => step(1), ArrowUp: () => step(-1, true), ArrowDown: () => step(1, true),
  "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: () => look(0, Infinity),
  u: undo, U: undo, Escape: () => choose(null), "[": () => shift(-1), "]": () => shift(1),
};
big.addEventListener("keydown", (event) => {
  if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey || !shownStep()) return;
  event.preventDefault();
  if (event.shiftKey && state.chosen && event.key.startsWith("Arrow")) shove(event.key); else KEYS[event.key]();
});

// ---- the rest of the page
onChange(() => { forget(); say(""); redraw(); });
const on = (id, kind, does) => $(id).addEventListener(kind, does);
on("shown", "change", () => show($("shown").value));
on("order", "change", drawCards);
on("in", "click", () => zoom(1.5));
on("out", "click", () => zoom(1 / 1.5));
on("all", "click", () => look(0, Infinity));
on("undo", "click", undo);
on("swap", "click", exchange);
on("apply", "click", () => takeText($("csv").value));
on("text", "toggle", fillText);
on("file", "change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  $("csv").value = await file.text();
  event.target.value = "";
  await takeText($("csv").value);
});
on("save", "click", () => {
  const url = URL.createObjectURL(new Blob([$("csv").value], { type: "text/csv" }));
  element("a", { href: url, download: `${state.shown}.csv` }).click();
});
on("link", "click", async () => {
  await writeLink(state.shown, state.own);
  try { await navigator.clipboard.writeText(location.href); $("link").textContent = "Copied"; } catch { $("link").textContent = "It is in the address bar"; }
  setTimeout(() => { $("link").textContent = "Copy link"; }, 1500);
});
const follow = async () => { const found = await readLink(); Object.assign(state, { shown: found.shown, own: found.own }); return found.problem; };
addEventListener("hashchange", async () => { forget(); say(await follow()); redraw(); });
new ResizeObserver(() => { if (state.summary.front.length) drawAll(); }).observe($("focus"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
const entry = (colour, text, border = colour) => element("span", {}, Object.assign(element("i"), { style: `background: ${colour}; border: 1px solid ${border}` }), text);
$("legend").append(...Object.entries(words).map(([kind, text]) => entry(actions[kind], `${kind} ${text}`)), entry("var(--memory-soft)", "memory held", "var(--memory)"), "darker: a later partition of the device");

function withoutPython(error) { // other schedules, their order and zoom need no answer, and stay
  say(`Python did not start: ${error.message}. The page shows the settings that it was made with; nothing can be changed.`, true);
  $("engine").textContent = "no Python";
  for (const id of ["controls", "exchange", "text", "big"]) $(id).inert = true;
  $("hint").hidden = true;
}

try {
  const problem = await follow(), began = performance.now();
  start.then((text) => {
    $("engine").textContent = text;
    document.body.dataset.start = Math.round(performance.now() - began);
  }, withoutPython);
  state.names = (await ask("names")).names;
  for (const name of ["yours", ...state.names]) {
    const [tag, said, canvas] = [element("span", { className: "tag" }), element("span", { className: "facts" }), element("canvas")];
    const card = element("button", { className: "one", type: "button" }, element("span", { className: "bar" }, element("strong", { textContent: name }), said, tag), canvas);
    card.dataset.name = name;
    card.addEventListener("click", () => { show(name); $("focus").scrollIntoView({ block: "nearest" }); });
    state.cards[name] = { card, tag, words: said, canvas };
  }
  await redraw();
  if (problem) say(problem, true);
} catch (error) { say(`The page did not start: ${error.message}`, true); }
