"use strict";
// The interactive timeline: one or two runs on one axis of time, drawn on a canvas.
// What is shown stands in data attributes of #timeline, so that a script can read it: from, to, variant, other, drawn.
(() => {
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
  const NARROW = 560, RIGHT = 12, LANE = { compute: 26, copy: 18 }, GAP = 7, TITLE = 22, AXIS = 30;
  const SHORTEST_US = 1;
  const state = { set: data.sets[0], runs: [], from: 0, to: 1, hover: null, places: [] };

  const span = () => Math.max(...state.runs.map((run) => run.span_us));
  const narrow = () => canvas.clientWidth < NARROW;
  const left = () => (narrow() ? 44 : 128);
  const width = () => canvas.clientWidth - left() - RIGHT;
  const x = (time) => left() + ((time - state.from) / (state.to - state.from)) * width();
  const time = (pixel) => state.from + ((pixel - left()) / width()) * (state.to - state.from);

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

  function box(place, event) {
    const lane = place.lanes[event[at.lane]];
    const height = lane.height / event[at.tracks];
    const start = x(event[at.start_us]);
    return {
      left: start, width: Math.max(x(event[at.end_us]) - start, 0.75),
      top: lane.top + event[at.track] * height + 1, height: height - 2,
    };
  }

  function drawRun(pen, place) {
    const { run, lanes } = place;
    const edge = left();
    pen.fillStyle = colour.ink;
    pen.font = "bold 12px sans-serif";
    pen.textAlign = "left";
    pen.fillText(`${run.name}: ${duration(run.span_us)}`, 0, place.title + 14);
    pen.font = "11px sans-serif";
    const right = edge + width();
    const end = Math.min(Math.max(x(run.span_us), edge), right);
    const start = Math.min(Math.max(x(0), edge), right);
    run.lanes.forEach((lane, index) => {
      const first = !index || lane.partition !== run.lanes[index - 1].partition;
      pen.fillStyle = first ? colour.ink : colour.faint;
      const label = !first ? lane.stream : narrow() ? `part. ${lane.partition}` : `partition ${lane.partition}, ${lane.device}`;
      pen.fillText(label, 0, lanes[index].top + lanes[index].height / 2 + 4, edge - 6);
      pen.fillStyle = colour.idle;
      pen.fillRect(start, lanes[index].top, end - start, lanes[index].height);
    });
    pen.save();
    pen.beginPath();
    pen.rect(edge, place.title, width(), lanes.at(-1).top + lanes.at(-1).height - place.title + 1);
    pen.clip();
    let drawn = 0;
    for (const event of run.events) {
      if (event[at.end_us] < state.from || event[at.start_us] > state.to) continue;
      const kind = data.kinds[event[at.kind]];
      const { left: start, top, width: wide, height } = box(place, event);
      pen.fillStyle = kind.colour;
      pen.fillRect(start, top, wide, height);
      drawn += 1;
      if (wide > 3) {
        pen.strokeStyle = "#00000055";
        pen.lineWidth = 1;
        pen.strokeRect(start + 0.5, top + 0.5, wide - 1, height - 1);
      }
      const word = `${kind.letter}${event[at.microbatch]}`;
      if (wide > 9 * word.length && height > 10) {
        pen.fillStyle = ["copy_grad", "portal", "portal_grad"].includes(kind.name) ? "#ffffff" : "#000000";
        pen.textAlign = "center";
        // In the part of the box that can be seen.
        const middle = (Math.max(start, edge) + Math.min(start + wide, right)) / 2;
        pen.fillText(word, middle, top + height / 2 + 4);
        pen.textAlign = "left";
      }
      if (state.hover && state.hover.event === event) {
        pen.strokeStyle = colour.selected;
        pen.lineWidth = 2.5;
        pen.strokeRect(start, top, wide, height);
      }
    }
    pen.restore();
    return drawn;
  }

  function drawAxis(pen, bottom) {
    const length = state.to - state.from;
    const [scale, name] = unit(length);
    const rough = length / Math.max(width() / 90, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
    pen.strokeStyle = colour.grid;
    pen.fillStyle = colour.ink;
    pen.lineWidth = 1;
    pen.textAlign = "center";
    const digits = Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9));
    for (let tick = Math.ceil(state.from / step) * step; tick <= state.to; tick += step) {
      pen.beginPath();
      pen.moveTo(Math.round(x(tick)) + 0.5, TITLE);
      pen.lineTo(Math.round(x(tick)) + 0.5, bottom - AXIS + 6);
      pen.stroke();
      pen.fillText((tick / scale).toFixed(digits), x(tick), bottom - AXIS + 20);
    }
    pen.textAlign = "left";
    pen.fillText(name, 0, bottom - AXIS + 20);
  }

  function draw() {
    const height = layOut();
    colour = colours();
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, canvas.clientWidth, height);
    pen.font = "11px sans-serif";
    drawAxis(pen, height);
    const drawn = state.places.reduce((sum, place) => sum + drawRun(pen, place), 0);
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
      `${data.kinds[event[at.kind]].name} of micro-batch ${event[at.microbatch]}, partition ${event[at.partition]}`,
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
    entry.append(patch, `${kind.letter} ${kind.name.replace("_grad", " of a gradient").replace("_", " ")}`);
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
