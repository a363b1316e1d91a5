// What the page draws: one step, large or small, and time over memory. Colours and boxes are those of the report.
const { drawAxis, drawBoxes, drawHeld, drawIdle, fit, FONT, later, scale, ticks } = timelineDrawing;
export const { actions, words, over } = JSON.parse(document.getElementById("colours").textContent);
const NAMES = ["card", "ink", "faint", "rule", "idle", "accent", "bad", "memory", "memory-soft"];
export const colours = () => {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
};

function boxesOf(step, row, numbered) {
  const parts = Math.max(...step.parts);
  return row.start.map((start, k) => {
    const depth = parts ? step.parts[row.j[k]] / parts : 0, colour = actions[row.kinds[k]];
    return { start, end: row.end[k], colour: depth ? later(colour, depth, over) : colour, text: numbered ? `${row.i[k]}` : "" };
  });
}

// A lane for each device, with what it holds below. Gives where things are: the scale of time, and tops of lanes.
export function drawStep(canvas, step, { lane, gap, memory = 0, left = 0, view, limit, most, colour, axis = false }) {
  const pitch = lane + (memory ? memory + 2 : 0) + gap, bottom = step.rows.length * pitch;
  const { pen, width } = fit(canvas, bottom + (axis ? 20 : 0)), at = scale(view, left, width - 1);
  step.rows.forEach((row, device) => {
    const top = device * pitch;
    if (left) {
      pen.font = `11px ${FONT}`;
      pen.fillStyle = colour.faint;
      pen.textAlign = "right";
      pen.fillText(`${device}`, left - 6, top + lane / 2 + 0.5);
    }
    drawIdle(pen, at, { top, height: lane }, step.makespan, colour.idle, axis ? 3 : 0);
    pen.save();
    pen.beginPath();
    pen.rect(at.left, top, at.right - at.left, pitch);
    pen.clip();
    if (memory) {
      const steps = row.start.map((start, k) => ({ start, end: row.end[k], during: row.during[k], after: row.after[k] }));
      const look = { most, limit: axis ? limit : NaN, area: colour["memory-soft"], line: colour.memory, bad: colour.bad };
      drawHeld(pen, at, { top: top + lane + 2, height: memory }, steps, step.makespan, look);
    }
    drawBoxes(pen, at, { top, height: lane }, boxesOf(step, row, axis), { round: axis ? 3 : 0, words: axis });
    pen.restore();
  });
  if (axis) drawAxis(pen, at, bottom, { colour: colour.faint });
  return { ...at, pen, lane, pitch, top: (device) => device * pitch };
}

const digits = (value) => Number(value.toPrecision(4)).toString();
// Points of all schedules, the line of those that no other one beats, and the limit.
export function drawPlot(canvas, steps, front, shown, limit) {
  const colour = colours(), names = Object.keys(steps).filter((name) => !steps[name].problems);
  const { pen, width, height } = fit(canvas, Math.min(340, Math.max(240, canvas.clientWidth * 0.95)));
  if (!names.length) return;
  const box = { left: 38, right: width - 8, top: 10, bottom: height - 34 };
  const memory = [...names.map((name) => steps[name].peak), limit], times = names.map((name) => steps[name].makespan);
  const pad = (values) => (Math.max(...values) - Math.min(...values) || Math.max(...values) || 1) * 0.09;
  const from = Math.min(...times) - pad(times), to = Math.max(...times) + pad(times), most = Math.max(...memory) * 1.09 || 1;
  const x = (value) => box.left + (value / most) * (box.right - box.left);
  const y = (value) => box.bottom - ((value - from) / (to - from)) * (box.bottom - box.top);
  const line = (...points) => { pen.beginPath(); points.forEach(([a, b], k) => pen[k ? "lineTo" : "moveTo"](a, b)); pen.stroke(); };
  pen.font = `11px ${FONT}`;
  pen.fillStyle = colour.faint;
  pen.strokeStyle = colour.rule;
  for (const tick of ticks(0, most, 5)) {
    pen.textAlign = "center";
    pen.fillText(digits(tick), x(tick), box.bottom + 11);
    line([x(tick), box.top], [x(tick), box.bottom]);
  }
  for (const tick of ticks(from, to, 5)) {
    pen.textAlign = "right";
    pen.fillText(digits(tick), box.left - 5, y(tick));
    line([box.left, y(tick)], [box.right, y(tick)]);
  }
  pen.textAlign = "right";
  pen.fillText("peak memory (activations of a stage)", box.right, height - 7);
  pen.strokeStyle = colour.bad;
  pen.setLineDash([4, 3]);
  line([x(limit), box.top], [x(limit), box.bottom]);
  pen.setLineDash([]);
  const best = front.map((name) => steps[name]).filter((step) => step && !step.problems);
  pen.strokeStyle = colour.accent;
  pen.lineWidth = 1.5;
  const path = best.flatMap((step, k) => [...(k ? [[x(best[k - 1].peak), y(step.makespan)]] : []), [x(step.peak), y(step.makespan)]]);
  line(...path);
  const lines = [...path.slice(1).map((end, k) => [path[k], end]), [[x(limit), box.top], [x(limit), box.bottom]]]
    .map(([[a, b], [c, d]]) => [Math.min(a, c) - 1, Math.min(b, d) - 1, Math.abs(c - a) + 2, Math.abs(d - b) + 2]);
  // Equal points share a label; labels take the first free place around their point, off the lines where there is one.
  const spots = {};
  for (const name of names) (spots[`${steps[name].peak} ${steps[name].makespan}`] ||= []).push(name);
  const onFront = (group) => group.some((name) => front.includes(name));
  const groups = Object.values(spots).sort((a, b) => onFront(b) - onFront(a));
  const taken = groups.map(([name]) => [x(steps[name].peak) - 5, y(steps[name].makespan) - 5, 10, 10]);
  for (const group of groups) {
    const cx = x(steps[group[0]].peak), cy = y(steps[group[0]].makespan), chosen = group.includes(shown);
    pen.beginPath();
    pen.arc(cx, cy, chosen ? 6 : 4, 0, 7);
    pen.fillStyle = onFront(group) ? colour.accent : colour.faint;
    pen.fill();
    if (chosen) { pen.strokeStyle = colour.ink; pen.lineWidth = 2; pen.stroke(); }
    pen.font = `${chosen ? "bold " : ""}11px ${FONT}`;
    const text = group.join(", "), w = pen.measureText(text).width, [right, left, middle] = [cx + 8, cx - 8 - w, cx - w / 2];
    const rows = [-7, 4, -18, -22, 8, 18].flatMap((dy) => [right, left, middle].map((a) => [a, cy + dy]));
    const clear = (things) => ([a, b]) => a > box.left && a + w < width && b > 0 && b + 14 < box.bottom
      && !things.some(([c, d, e, f]) => a < c + e && c < a + w && b < d + f && d < b + 14);
    const free = rows.find(clear([...taken, ...lines])) || rows.find(clear(taken));
    if (!free) continue;
    taken.push([...free, w, 14]);
    pen.textAlign = "left";
    pen.lineWidth = 4;
    pen.lineJoin = "round";
    pen.strokeStyle = colour.card;
    pen.strokeText(text, free[0], free[1] + 7);
    pen.fillStyle = onFront(group) || chosen ? colour.ink : colour.faint;
    pen.fillText(text, free[0], free[1] + 7);
  }
}
