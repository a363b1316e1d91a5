"use strict";
// The interactive timeline: one or two runs on one axis of time, drawn on a canvas.
// What is shown stands in data attributes of #timeline, so that a script can read it: from, to, variant, other, drawn.
(() => {
  const { drawAxis, drawBoxes, drawIdle, fit, FONT, later, scale } = timelineDrawing;
  const data = JSON.parse(document.getElementById("timeline-data").textContent);
  const find = (id) => document.getElementById(`timeline${id ? `-${id}` : ""}`);
  const [root, canvas, tip] = [find(), find("canvas"), find("tip")];
  const at = Object.fromEntries(data.fields.map((name, index) => [name, index]));
  // Colours of the page, light or dark; the kinds of task have the colours of the figures in both.
  const colours = () => {
    const style = getComputedStyle(root);
    return Object.fromEntries(["ink", "faint", "idle", "grid", "selected"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
  };
  let colour = {};
  const NARROW = 560, RIGHT = 12, LANE = { compute: 26, copy: 18 }, GAP = 7, TITLE = 22, AXIS = 30, ROUND = 3;
  const SHORTEST_US = 1;
  const state = { set: data.sets[0], runs: [], from: 0, to: 1, hover: null, places: [] };

  const span = () => Math.max(...state.runs.map((run) => run.span_us));
  const narrow = () => canvas.clientWidth < NARROW;
  const left = () => (narrow() ? 44 : 128);
  const width = () => canvas.clientWidth - left() - RIGHT;
  const axis = () => scale(state, left(), left() + width());
  const time = (pixel) => axis().time(pixel);

  // Three digits in the unit that fits.
  const unit = (length) => (length >= 2e6 ? [1e6, "s"] : length >= 2e3 ? [1e3, "ms"] : [1, "µs"]);
  const duration = (us) => {
    const [scale, name] = unit(Math.abs(us));
    return `${Number((us / scale).toPrecision(4))} ${name}`;
  };
  const bytes = (count) => {
    const step = count >= 2 ** 30 ? [2 ** 30, "GiB"] : count >= 2 ** 20 ? [2 ** 20, "MiB"] : count >= 1024 ? [1024, "KiB"] : [1, "B"];
    return `${Number((count / step[0]).toPrecision(4))} ${step[1]}`;
  };

  function layOut() {
    // Lanes of all shown runs from top to bottom, each with its top and height in pixels.
    let top = 0;
    state.places = state.runs.map((run) => {
      const title = top;
      top += TITLE;
      const lanes = run.lanes.map((lane, index) => {
        if (index && lane.partition !== run.lanes[index - 1].partition) top += GAP;
        const place = { top, height: LANE[lane.stream] };
        top += place.height;
        return place;
      });
      top += GAP * 2;
      return { run, title, lanes };
    });
    return top + AXIS;
  }

  // Where a task is drawn, for the pointer and for the outline of what it is on.
  function box(place, event) {
    const lane = place.lanes[event[at.lane]], height = lane.height / event[at.tracks], start = axis().x(event[at.start_us]);
    return {
      left: start, width: Math.max(axis().x(event[at.end_us]) - start, 0.75), top: lane.top + event[at.track] * height, height,
    };
  }

  function boxesOf(run, index) {
    const over = run.lanes[index].depth;
    return run.events.filter((event) => event[at.lane] === index).map((event) => {
      const own = data.kinds[event[at.kind]].colour;
      return {
        start: event[at.start_us], end: event[at.end_us], colour: over ? later(own, over, data.over) : own,
        text: `${event[at.microbatch]}`, track: event[at.track], tracks: event[at.tracks],
      };
    });
  }

  function drawRun(pen, where, place) {
    const { run, lanes } = place;
    pen.fillStyle = colour.ink;
    pen.font = `bold 12px ${FONT}`;
    pen.textAlign = "left";
    pen.fillText(`${run.name}: ${duration(run.span_us)}`, 0, place.title + 10);
    run.lanes.forEach((lane, index) => {
      const first = !index || lane.partition !== run.lanes[index - 1].partition;
      const label = !first ? lane.stream : narrow() ? `part. ${lane.partition}` : `partition ${lane.partition}, ${lane.device}`;
      pen.font = `11px ${FONT}`;
      pen.textAlign = "left";
      pen.fillStyle = first ? colour.ink : colour.faint;
      pen.fillText(label, 0, lanes[index].top + lanes[index].height / 2, left() - 6);
      drawIdle(pen, where, lanes[index], run.span_us, colour.idle, ROUND);
    });
    pen.save();
    pen.beginPath();
    pen.rect(where.left, place.title, where.right - where.left, lanes.at(-1).top + lanes.at(-1).height - place.title + 1);
    pen.clip();
    const drawn = lanes.reduce((sum, lane, index) => sum + drawBoxes(pen, where, lane, boxesOf(run, index), { round: ROUND }), 0);
    if (state.hover && state.hover.run === run) {
      const spot = box(place, state.hover.event);
      pen.strokeStyle = colour.selected;
      pen.lineWidth = 2.5;
      pen.strokeRect(spot.left, spot.top, spot.width, spot.height);
    }
    pen.restore();
    return drawn;
  }

  function draw() {
    const height = layOut(), { pen } = fit(canvas, height), where = axis();
    colour = colours();
    const [size, name] = unit(state.to - state.from);
    const inUnits = scale({ from: state.from / size, to: state.to / size }, where.left, where.right);
    drawAxis(pen, inUnits, height - AXIS + 6, { colour: colour.ink, grid: { colour: colour.grid, top: TITLE } });
    pen.fillText(name, 0, height - AXIS + 18);
    const drawn = state.places.reduce((sum, place) => sum + drawRun(pen, where, place), 0);
    Object.assign(root.dataset, {
      from: state.from, to: state.to, drawn, set: state.set.name,
      variant: state.runs[0].name, other: state.runs[1] ? state.runs[1].name : "",
    });
  }

  function show(from, to) {
    const whole = span();
    const length = Math.min(Math.max(to - from, SHORTEST_US), whole);
    state.from = Math.min(Math.max(from, 0), whole - length);
    state.to = state.from + length;
    draw();
  }
  const all = () => show(0, span());
  function zoom(factor, centre = (state.from + state.to) / 2) {
    show(centre - (centre - state.from) / factor, centre + (state.to - centre) / factor);
  }
  const move = (share) => show(state.from + share * (state.to - state.from), state.to + share * (state.to - state.from));

  function words({ run, event }) {
    const lane = run.lanes[event[at.lane]];
    const times = `${duration(event[at.start_us])} to ${duration(event[at.end_us])}, for ${duration(event[at.end_us] - event[at.start_us])}`;
    return [
      `${data.kinds[event[at.kind]].words} of micro-batch ${event[at.microbatch]}, partition ${event[at.partition]}`,
      `${run.devices[event[at.device]]}, ${lane.stream} stream`,
      times,
      event[at.issue_us] < 0
        ? `issued ${duration(-event[at.issue_us])} before the first task began: the host runs ahead`
        : `issued at ${duration(event[at.issue_us])}`,
      event[at.bytes] ? `${bytes(event[at.bytes])}` : "no bytes moved",
    ].join("\n");
  }

  function hit(pixel, top) {
    if (pixel < left() || pixel > left() + width()) return null;
    for (const place of state.places) {
      // The last one drawn lies on top.
      for (let index = place.run.events.length - 1; index >= 0; index -= 1) {
        const event = place.run.events[index];
        const spot = box(place, event);
        const slack = Math.max(0, (3 - spot.width) / 2);
        if (pixel >= spot.left - slack && pixel <= spot.left + spot.width + slack && top >= spot.top && top <= spot.top + spot.height) {
          return { run: place.run, event };
        }
      }
    }
    return null;
  }

  function hover(pointer) {
    const found = pointer && hit(pointer.offsetX, pointer.offsetY);
    const changed = (found && found.event) !== (state.hover && state.hover.event);
    state.hover = found;
    tip.hidden = !found;
    if (found) {
      tip.textContent = words(found);
      const room = root.clientWidth - tip.offsetWidth - 8;
      tip.style.left = `${Math.max(0, Math.min(canvas.offsetLeft + pointer.offsetX + 14, room))}px`;
      tip.style.top = `${canvas.offsetTop + pointer.offsetY + 16}px`;
    }
    if (changed) draw();
  }

  const option = (text, value = text) => new Option(text, value);
  function chooseSet(index) {
    state.set = data.sets[index];
    const names = state.set.runs.map((run) => run.name);
    find("variant").replaceChildren(...names.map((name) => option(name)));
    find("other").replaceChildren(option("nothing", ""), ...names.map((name) => option(name)));
    const all = names.find((name) => name.startsWith("dep-str-ptl"));
    if (all && all !== names[0]) find("other").value = all;
    const badge = find("badge");
    badge.className = `badge ${state.set.evidence}`;
    badge.textContent = state.set.evidence;
    chooseRuns();
  }
  function chooseRuns() {
    const chosen = [find("variant").value, find("other").value].filter(Boolean);
    state.runs = chosen.map((name) => state.set.runs.find((run) => run.name === name));
    state.hover = null;
    tip.hidden = true;
    find("words").textContent = state.runs.map((run) => `${run.name}: ${run.words}`).join("\n");
    all();
  }

  find("set").append(...data.sets.map((set, index) => option(set.name, String(index))));
  find("set").addEventListener("change", (event) => chooseSet(Number(event.target.value)));
  find("variant").addEventListener("change", chooseRuns);
  find("other").addEventListener("change", chooseRuns);
  find("in").addEventListener("click", () => zoom(2));
  find("out").addEventListener("click", () => zoom(0.5));
  find("all").addEventListener("click", all);
  const used = new Set(data.sets.flatMap((set) => set.runs.flatMap((run) => run.events.map((event) => event[at.kind]))));
  find("kinds").append(...data.kinds.filter((_, index) => used.has(index)).map((kind) => {
    const [entry, patch] = [document.createElement("span"), document.createElement("i")];
    patch.style.background = kind.colour;
    entry.append(patch, kind.words);
    return entry;
  }));

  canvas.addEventListener("wheel", (event) => {
    // Without a modifier the wheel scrolls the page.
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    if (event.shiftKey) move(Math.sign(event.deltaX + event.deltaY) * 0.1);
    else zoom(1.25 ** -Math.sign(event.deltaY), time(event.offsetX));
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { pixel: event.offsetX, from: state.from, to: state.to };
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("dragging");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return hover(event);
    const by = ((drag.pixel - event.offsetX) / width()) * (drag.to - drag.from);
    return show(drag.from + by, drag.to + by);
  });
  const drop = () => { drag = null; canvas.classList.remove("dragging"); };
  canvas.addEventListener("pointerup", drop);
  canvas.addEventListener("pointercancel", drop);
  canvas.addEventListener("pointerleave", () => hover(null));
  canvas.addEventListener("dblclick", (event) => zoom(4, time(event.offsetX)));
  root.addEventListener("keydown", (event) => {
    if (event.target.tagName === "SELECT") return;
    const keys = { "+": () => zoom(2), "=": () => zoom(2), "-": () => zoom(0.5), 0: all, ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2) };
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  new ResizeObserver(draw).observe(root);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", draw);
  chooseSet(0);
})();
