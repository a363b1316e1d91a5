"""Draw schedules for docs/schedules.md and docs/training.md, each as its module makes and times it.

    python -m scripts.draw_schedules            write docs/pictures/schedules.svg and clock_cycles.svg

A panel is a schedule, a row a device, and all panels have one axis of time. Where a device has two partitions, each of
them is half as large, so all panels show the same network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gpipe_bench.drawing.colours import KIND_COLOURS
from gpipe_bench.schedules import SCHEDULES, Action, Durations, Timing, check, named_schedule, timing
from gpipe_bench.schedules.table import partition_count
from scripts.table_contents import ROOT

PICTURE: Final = ROOT / "docs" / "pictures" / "schedules.svg"
CYCLES: Final = ROOT / "docs" / "pictures" / "clock_cycles.svg"
DEVICES: Final = 3
MICROBATCHES: Final = 6
_KINDS: Final = {
    "F": ("forward", "forward pass"),
    "B": ("backward", "backward pass"),
    "I": ("backward_inputs", "its part I (inputs)"),
    "W": ("backward_weights", "its part W (weights)"),
}
# Pixels: the picture, the left end of the axis of time, one T_F of a whole partition, and the height of a row.
_WIDTH, _LEFT, _UNIT, _ROW = 720, 134, 22, 20
_TOP, _PANEL = 108, 3 * _ROW + 16
_STYLE: Final = """  <style>
    text { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #222222; text-anchor: middle; }
    .small { font-size: 12px; fill: #555555; }
    .in { font-size: 11px; }
    .left { text-anchor: start; }
    .right { text-anchor: end; }
    .name { font-weight: 600; }
    .idle { fill: #eeeeee; }
    .task { stroke: #444444; stroke-width: 0.8; }
    .second { fill: #222222; }
"""


def drawn_schedules() -> str:
    """The picture as SVG."""
    height = _TOP + len(SCHEDULES) * _PANEL
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    words = f"Timelines of {len(SCHEDULES)} schedules: {', '.join(SCHEDULES)}"
    frame = f'x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8" fill="#ffffff" stroke="#cccccc"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{words}">',
        _STYLE + "".join(f"    .{kind} {{ fill: {KIND_COLOURS[name]}; }}\n" for kind, (name, _) in _KINDS.items()),
        f"  </style>\n  <rect {frame}/>",
        _text(20, 28, f"{MICROBATCHES} micro-batches on {DEVICES} devices, with T_F = T_B = T_W", "name left"),
        *_legend(),
        _text(_WIDTH - 44, 96, "in flight", "small"),
    ]
    for number, name in enumerate(SCHEDULES):
        lines += _panel(name, _TOP + number * _PANEL)
    return "\n".join([*lines, "</svg>"]) + "\n"


def drawn_cycles() -> str:
    """Naive model parallelism above the clock-cycles of torchgpipe, on one axis of time, as SVG.

    Both train one batch on equal partitions with free copies and T_B + T_W = 2 T_F. Naive model parallelism is the
    same schedule with one micro-batch, which takes as long as all of them.
    """
    devices, m, unit, left, width = 3, 5, 12, 104, 672
    size = f'viewBox="0 0 {width} 266" width="{width}" height="266"'
    whole = timing(named_schedule("gpipe", 1, devices, devices), Durations(m, m, m))
    cut = timing(named_schedule("gpipe", m, devices, devices))
    gain = f"{whole.makespan / cut.makespan:.2f}"
    words = f"One batch on {devices} devices: naive model parallelism, and the same batch in {m} micro-batches"
    frame = f'x="0.5" y="0.5" width="{width - 1}" height="265" rx="8" fill="#ffffff" stroke="#cccccc"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{words}">',
        _STYLE + "".join(f"    .{kind} {{ fill: {KIND_COLOURS[_KINDS[kind][0]]}; }}\n" for kind in "FB"),
        f"  </style>\n  <rect {frame}/>",
        _text(20, 28, "Naive model parallelism: one device works at a time", "name left"),
        _text(width - 20, 28, f"bubble {whole.bubble:.0%}".replace("%", " %"), "small right"),
        *_lanes(whole, devices, (left, 44, unit), numbered=False),
        _text(
            20,
            136,
            f"Clock-cycles: micro-batch i runs in partition j at cycle i + j, {gain} times as fast",
            "name left",
        ),
        _text(width - 20, 136, f"bubble {cut.bubble:.0%}".replace("%", " %"), "small right"),
        *_lanes(cut, devices, (left, 168, unit), numbered=True),
        *(_text(left + k * unit + unit // 2, 160, str(k), "small") for k in range(m + devices - 1)),
        _text(20, 160, "cycle", "small left"),
    ]
    for x, style, meaning in ((20, "task F", "forward"), (104, "task B", "backward"), (194, "idle", "idle")):
        lines += [_boxes(style, [(x, 16)], 242, 14), _text(x + 22, 254, meaning, "small left")]
    said = "Computed: equal partitions, free copies. Numbers: micro-batches."
    lines.append(_text(width - 20, 254, said, "small right"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _lanes(times: Timing, devices: int, place: tuple[int, int, int], *, numbered: bool) -> Iterator[str]:
    """A row for each device; ``place``: left end, top, and pixels of a unit of time."""
    left, top, unit = place
    for device in range(devices):
        y = top + device * _ROW
        yield _text(20, y + 14, f"partition {device}", "small left")
        yield _boxes("idle", [(left, round(times.makespan * unit))], y)
        own = [action for action in times.start if action.j == device]
        spans = {
            one: (left + round(times.start[one] * unit), round((times.end[one] - times.start[one]) * unit))
            for one in own
        }
        for kind in "FB":
            yield _boxes(f"task {kind}", [span for one, span in spans.items() if one.kind == kind], y)
        if numbered:
            middles = " ".join(f"{x + wide / 2:g}" for x, wide in spans.values())
            yield f'  <text class="in" x="{middles}" y="{y + 13}">{"".join(str(one.i) for one in spans)}</text>'


def _legend() -> Iterator[str]:
    x = 20
    for kind, (_, meaning) in _KINDS.items():
        yield _boxes(f"task {kind}", [(x, 16)], 44, 16)
        yield _text(x + 22, 57, meaning, "small left")
        x += 40 + round(6.4 * len(meaning))
    yield _boxes("idle", [(x, 16)], 44, 16)
    yield _text(x + 22, 57, "bubble", "small left")
    yield _boxes("task F", [(20, 16)], 68, 16)
    yield _boxes("second", [(20, 16)], 81, 3)
    yield _text(42, 81, "dark edge: the second partition of a device; each has half of its layers", "small left")


def _panel(name: str, top: int) -> Iterator[str]:
    """One schedule, with its name and numbers to the left and the activations in flight to the right."""
    n = partition_count(name, DEVICES)
    facts = check(named_schedule(name, MICROBATCHES, n, DEVICES))
    times, unit = timing(facts.schedule), _UNIT * DEVICES // n
    yield _text(20, top + 24, name, "name left")
    yield _text(20, top + 44, f"bubble {times.bubble:.1%}".replace("%", " %"), "small left")
    for device, row in enumerate(facts.schedule.devices):
        y = top + device * _ROW
        places = [(action, _LEFT + round(times.start[action] * unit)) for action in row]
        yield _boxes("idle", [(_LEFT, round(times.makespan * unit))], y)
        for kind in dict.fromkeys(action.kind for action in row):
            yield _boxes(f"task {kind}", [(x, _width(action, unit)) for action, x in places if action.kind == kind], y)
        later = [(x, _width(action, unit)) for action, x in places if action.j >= DEVICES]
        if later:
            yield _boxes("second", later, y + _ROW - 5, 3)
        # One text with a place for each of its characters, which are the micro-batches.
        middles = " ".join(f"{x + _width(action, unit) / 2:g}" for action, x in places)
        yield f'  <text class="in" x="{middles}" y="{y + 13}">{"".join(str(action.i) for action in row)}</text>'
        held = f"{facts.in_flight[device]}" + (" halves" if n == 2 * DEVICES else "")
        yield _text(_WIDTH - 44, y + 14, held, "small")


def _width(action: Action, unit: int) -> int:
    return unit * (2 if action.kind == "B" else 1)


def _boxes(style: str, spans: Sequence[tuple[int, int]], y: int, height: int = _ROW - 2) -> str:
    """Boxes side by side, one for each (left end, width), as one path."""
    outline = "".join(f"M{x} {y}h{width}v{height}h-{width}z" for x, width in spans)
    return f'  <path class="{style}" d="{outline}"/>'


def _text(x: int, y: int, words: str, style: str) -> str:
    return f'  <text class="{style}" x="{x}" y="{y}">{words}</text>'


if __name__ == "__main__":
    PICTURE.write_text(drawn_schedules(), encoding="utf-8")
    CYCLES.write_text(drawn_cycles(), encoding="utf-8")
