"use strict";
// Draws timelines on a canvas: lanes of boxes, what is held below a lane, and the axis of time.
// Report and playground share it. It knows nothing of schedules: what runs when, and what is held, is given.
const timelineDrawing = (() => {
  const FONT = "system-ui, 'DejaVu Sans', sans-serif";

  // A pen in CSS pixels, sharp on every screen.
  function fit(canvas, height) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.textBaseline = "middle";
    return { pen, width, height };
  }

  // From time to pixels and back; times from view.from to view.to fill the pixels from left to right.
  function scale(view, left, right) {
    const length = view.to - view.from || 1;
    return {
      left, right, view,
      x: (time) => left + ((time - view.from) / length) * (right - left),
      time: (x) => view.from + ((x - left) / (right - left)) * length,
    };
  }

  // Round numbers, at most about `count` of them.
  function ticks(from, to, count) {
    const rough = (to - from) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough * 0.999);
    const found = [];
    for (let tick = Math.ceil(from / step - 1e-9) * step; tick <= to + 1e-9 * step; tick += step) {
      found.push(Number(tick.toPrecision(10)));
    }
    return found;
  }

  // A colour such as #E0702B, and how light it is, decide whether the word on it is dark or white.
  const inks = new Map();
  function inkOn(colour) {
    if (!inks.has(colour)) {
      const parts = [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16) / 255);
      const [red, green, blue] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
      inks.set(colour, 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.19 ? "#0d1620" : "#ffffff");
    }
    return inks.get(colour);
  }

  // The colour of a later partition of a device: `over` has a colour and the share that lies over the last one.
  const mixes = new Map();
  function later(colour, depth, over) {
    const key = `${colour} ${depth}`;
    if (!mixes.has(key)) {
      const share = depth * over[1];
      const part = (k) => Math.round((1 - share) * parseInt(colour.slice(k, k + 2), 16) + share * parseInt(over[0].slice(k, k + 2), 16));
      mixes.set(key, `#${[1, 3, 5].map((k) => part(k).toString(16).padStart(2, "0")).join("")}`);
    }
    return mixes.get(key);
  }

  // The ground of a lane: what is not covered by boxes is idle.
  function drawIdle(pen, at, place, end, colour, round = 0) {
    const clamp = (x) => Math.min(Math.max(x, at.left), at.right), start = clamp(at.x(0));
    pen.fillStyle = colour;
    pen.beginPath();
    pen.roundRect(start, place.top, Math.max(clamp(at.x(end)) - start, 0), place.height, round);
    pen.fill();
  }

  // Boxes of a lane: {start, end, colour, text, track, tracks}. Gives how many could be seen.
  // A small canvas of many boxes does not pay for rounded corners and words.
  function drawBoxes(pen, at, place, boxes, { round = 0, words = true } = {}) {
    let drawn = 0;
    for (const box of boxes) {
      const left = at.x(box.start), wide = at.x(box.end) - left;
      if (left > at.right || left + wide < at.left || box.end < box.start) continue;
      drawn += 1;
      const tracks = box.tracks || 1, height = place.height / tracks - (tracks > 1 ? 1 : 0), top = place.top + (place.height / tracks) * (box.track || 0);
      const shown = Math.max(wide - (wide > 4 ? 1 : wide > 2 ? 0.5 : 0), 0.6);
      pen.fillStyle = box.colour;
      if (round && wide > 5) {
        pen.beginPath();
        pen.roundRect(left, top, shown, height, Math.min(round, shown / 3, height / 3));
        pen.fill();
      } else pen.fillRect(left, top, shown, height);
      const text = box.text;
      if (words && text && height > 10 && wide > 5.2 * text.length + 1) {
        pen.font = `${wide < 7 * text.length + 3 ? 8.5 : 11}px ${FONT}`;
        pen.fillStyle = inkOn(box.colour);
        pen.textAlign = "center";
        // In the part of the box that can be seen.
        pen.fillText(text, (Math.max(left, at.left) + Math.min(left + shown, at.right)) / 2, top + height / 2 + 0.5);
      }
    }
    return drawn;
  }

  // What is held over time: steps {start, end, during, after} from the left, as an area; the limit as a dashed line.
  function drawHeld(pen, at, place, steps, end, { most, limit, area, line, bad }) {
    const base = place.top + place.height, y = (held) => base - (held / (most || 1)) * place.height;
    pen.beginPath();
    pen.moveTo(at.x(0), base);
    let held = 0;
    steps.forEach((step, k) => {
      // What is freed and taken at one time is no dip.
      if (!k || step.start - steps[k - 1].end > 1e-6) pen.lineTo(at.x(step.start), y(held));
      pen.lineTo(at.x(step.start), y(step.during));
      pen.lineTo(at.x(step.end), y(step.during));
      if (!steps[k + 1] || steps[k + 1].start - step.end > 1e-6) pen.lineTo(at.x(step.end), y(step.after));
      held = step.after;
    });
    pen.lineTo(at.x(end), y(held));
    pen.lineTo(at.x(end), base);
    pen.fillStyle = area;
    pen.fill();
    pen.strokeStyle = line;
    pen.lineWidth = 1;
    pen.stroke();
    if (!(limit <= most)) return;
    pen.strokeStyle = bad;
    pen.setLineDash([4, 3]);
    pen.beginPath();
    pen.moveTo(at.left, y(limit) + 0.5);
    pen.lineTo(Math.min(at.x(end), at.right), y(limit) + 0.5);
    pen.stroke();
    pen.setLineDash([]);
  }

  // Ticks below the lanes; `grid` has a colour and the top of lines through them, `words` makes the text of a tick.
  function drawAxis(pen, at, top, { colour, words = String, grid = null }) {
    pen.font = `11px ${FONT}`;
    for (const tick of ticks(at.view.from, at.view.to, (at.right - at.left) / 80)) {
      const x = Math.round(at.x(tick)) + 0.5;
      pen.fillStyle = grid ? grid.colour : colour;
      pen.fillRect(x - 0.5, grid ? grid.top : top, 1, grid ? top + 4 - grid.top : 4);
      pen.fillStyle = colour;
      pen.textAlign = x > at.right - 12 ? "right" : x < at.left + 8 ? "left" : "center";
      pen.fillText(words(tick), x, top + 12);
    }
    pen.textAlign = "left";
  }

  return { FONT, fit, scale, ticks, inkOn, later, drawIdle, drawBoxes, drawHeld, drawAxis };
})();
