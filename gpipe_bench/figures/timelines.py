"""One step of each published variant above the next, on one axis of time: what ran when in each partition.

The width of a chart is the length of the step, grey is idle time. The title of each chart names the component added to
the chart before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from gpipe_bench.components import PUBLISHED
from gpipe_bench.drawing.colours import KIND_COLOURS, KIND_WORDS
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.base import PAGE_IN, Figure, Panel, Rows, Selection, heading, legend, note
from gpipe_bench.figures.groups import setting_words
from gpipe_bench.figures.lanes import lane_keys, stack
from gpipe_bench.figures.runs import Run, choose_run
from gpipe_bench.figures.style import FAINT, FONT_PT, INK
from gpipe_bench.figures.tables import of_flavour, read_events, read_selected
from gpipe_bench.figures.text import TIMES, significant, text_width_pt
from gpipe_bench.results.breakdown import split_device_time
from gpipe_bench.results.timeline import KINDS, TimelineEvent
from gpipe_bench.schedules.cycles import ideal_bubble

# Hatch of each kind: what belongs to the backward pass is hatched, so that boxes of one colour in grey differ, too.
_HATCHES: Final = {
    "recompute": "------",
    "backward": "/////",
    "backward_inputs": "/////",
    "backward_weights": "\\\\\\\\\\",
    "copy_grad": "/////",
    "portal_grad": "/////",
}

_DARK: Final = ("copy_grad", "portal", "portal_grad")
_GROUND: Final = {"compute": "#E6E6E6", "copy": "#F6F6F6"}
_LANE_IN: Final = {"compute": 0.125, "copy": 0.065}
_GAP_IN: Final = 0.02
_HIGHEST_IN: Final = 2.5
_CHART: Final = 0.92
"""Width of a chart over that of the figure, about."""

# In a narrower box, edge and hatch would hide the colour.
_HATCHED_FROM_PT: Final = 2.5
_ADDED: Final = {
    "dep-x-x": "+ Fork and Join: every partition goes backward from the last micro-batch to the first",
    "dep-str-x": "+ copy streams: copies run beside the computation instead of stalling both devices",
    "dep-str-ptl": "+ portals: a skip hops straight to its destination instead of riding through every partition",
}
"""What each published variant adds to the one before."""


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """One step: its events, and the time at which it starts, in microseconds."""

    events: Sequence[TimelineEvent]
    start_us: float
    span_us: float

    @classmethod
    def of(cls, events: Sequence[TimelineEvent]) -> DrawnStep:
        """The step of some events."""
        # A host that runs ahead issues before the step begins, at the zero of the record.
        issued_us = max(min(event.issue_us for event in events), 0.0)
        start = min(issued_us, *(event.start_us for event in events))
        return cls(events, start, max(max(event.end_us for event in events) - start, 1e-3))

    @property
    def partitions(self) -> int:
        """How many there are."""
        return max(event.partition for event in self.events) + 1

    def idle(self) -> list[float]:
        """Share of the step in which neither a computation nor a copy of the partition ran."""
        shares = split_device_time(self.events, range(self.partitions), self.start_us, self.start_us + self.span_us)
        return [share.bubble_fraction + share.imbalance_fraction for share in shares]


def _read(path: FilePath, selection: Selection) -> dict[str, Run]:
    """The published variants' runs, or that of the asked variant; of two flavours that of print."""
    every = read_selected(path, selection)
    rows, evidence = of_flavour(every, "published"), every[0].evidence
    others = {row.cell for row in every} - {row.cell for row in rows}
    events = read_events(path.with_name(f"{path.stem}_events{path.suffix}"))
    events = [record for record in events if record.cell not in others]
    known = {row.variant for row in rows}
    asked = [selection.variant] if selection.variant else [variant for variant in PUBLISHED if variant in known]
    if not asked:
        raise ConfigError(
            [f"rows must hold published variants that are {evidence}, got none in {path}; name one with --variant"]
        )
    return {variant: choose_run(events, rows, variant, evidence) for variant in asked}


def _panels(runs: dict[str, Run], width_in: float) -> Rows:
    head = next(iter(runs.values())).row
    steps = {variant: DrawnStep.of(run.events) for variant, run in runs.items() if run.events}
    axis_us = max((step.span_us for step in steps.values()), default=0.0)
    base = runs.get(PUBLISHED[0])
    rows: Rows = [heading(_finding(head.model, steps), [head.evidence], setting_words(head), width_in)]
    for variant, run in runs.items():
        words = f"{variant}: {_summary(run, steps.get(variant), base)}"
        rows.append(note(words, width_in, colour=INK, bold=True))
        if variant in _ADDED and len(runs) > 1:
            rows.append(note(_ADDED[variant], width_in))
        if variant in steps:
            step, last = steps[variant], variant == list(steps)[-1]
            natural = sum(_LANE_IN[stream] for _, stream in lane_keys(step.events)) + step.partitions * _GAP_IN
            draw = partial(_draw, axis_us=axis_us, width_in=_CHART * width_in, last=last)
            rows.append([Panel(draw, step, min(natural, _HIGHEST_IN))])
    kinds = [kind for kind in KINDS if any(event.kind == kind for step in steps.values() for event in step.events)]
    handles = [Patch(label=KIND_WORDS[kind], **_look(kind, wide=True)) for kind in kinds]
    if kinds:
        rows.append(legend([*handles, Patch(facecolor=_GROUND["compute"], edgecolor="none", label="idle")], 8))
    return rows


def _finding(model: str, steps: dict[str, DrawnStep]) -> str:
    """How much the components shorten a step, where the first and the last variant ran."""
    first, last = PUBLISHED[0], PUBLISHED[-1]
    if not {first, last} <= steps.keys():
        return f"{model}: one training step"
    ends = [significant(steps[name].span_us / 1000) for name in (first, last)]
    return f"{model}: a training step takes {ends[0]} ms with {first} and {ends[1]} ms with {last}"


def _summary(run: Run, step: DrawnStep | None, base: Run | None) -> str:
    """Speed, gain over the baseline, memory, idle share and ideal bubble; why there is nothing where a run failed."""
    row = run.row
    if step is None:
        return run.remark or row.reason
    parts = [f"{significant(step.span_us / 1000)} ms"]
    if row.throughput_samples_per_s:
        parts.append(f"{significant(row.throughput_samples_per_s)} samples/s")
        if base and base is not run and base.row.throughput_samples_per_s:
            parts[-1] += f" ({row.throughput_samples_per_s / base.row.throughput_samples_per_s:.2f}{TIMES})"
    memory = row.peak_reserved_gib if row.peak_reserved_gib is not None else row.peak_allocated_gib
    parts += [f"{significant(memory)} GiB"] if memory is not None else []
    idle, microbatches = step.idle(), max(event.microbatch for event in step.events) + 1
    ideal = ideal_bubble(microbatches, step.partitions)
    parts.append(f"idle {sum(idle) / len(idle):.0%} (ideal bubble {ideal:.0%})")
    return ", ".join(parts)


def _draw(axes: Axes, step: DrawnStep, axis_us: float, width_in: float, *, last: bool) -> None:
    lanes, places, top = lane_keys(step.events), {}, 0.0
    for lane, (partition, stream) in enumerate(lanes):
        top += _GAP_IN if lane and partition != lanes[lane - 1][0] else 0.0
        places[partition, stream] = top, _LANE_IN[stream]
        top += _LANE_IN[stream]
    scale = min(1.0, _HIGHEST_IN / top)
    axes.set(xlim=(0, axis_us / 1000), ylim=(top, 0))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", labelbottom=last)
    if last:
        axes.set_xlabel("time since the start of the step (ms)")
    shapes: dict[tuple[str, bool], list[Path]] = {}
    for (partition, stream), (high, height) in places.items():
        ground = _GROUND[stream]
        axes.add_patch(Rectangle((0, high), step.span_us / 1000, height, facecolor=ground, linewidth=0))
        own = [event for event in step.events if (event.partition, event.stream) == (partition, stream)]
        for box in stack(own, step.span_us):
            start, length = (box.event.start_us - step.start_us) / 1000, box.event.end_us - box.event.start_us
            share = height / box.tracks
            middle = high + (box.track + 0.5) * share
            points = length * width_in * 72 / axis_us
            place = Affine2D().scale(length / 1000, share).translate(start, middle - share / 2)
            shape = Path.unit_rectangle().transformed(place)
            shapes.setdefault((box.event.kind, points >= _HATCHED_FROM_PT), []).append(shape)
            text = str(box.event.microbatch)
            if points >= text_width_pt(text) - 0.5 and share * scale * 72 >= FONT_PT + 1:
                _number(axes, (start + length / 2000, middle), text, box.event.kind)
    for (kind, wide), boxes in sorted(shapes.items()):
        # One shape for all of one look: its hatch is drawn once.
        axes.add_patch(PathPatch(Path.make_compound_path(*boxes), **_look(kind, wide=wide)))
    _label(axes, step, {partition: high for (partition, stream), (high, _) in places.items() if stream == "compute"})


def _look(kind: str, *, wide: bool) -> dict[str, Any]:
    fill, hatch = KIND_COLOURS[kind], _HATCHES.get(kind, "")
    if wide:
        ink = "white" if kind in _DARK else INK
        return {"facecolor": fill, "edgecolor": ink, "linewidth": 0.25, "hatch": hatch}
    return {"facecolor": fill, "edgecolor": fill, "linewidth": 0.15}


def _number(axes: Axes, place: tuple[float, float], text: str, kind: str) -> None:
    """The micro-batch in the middle of its box, on the plain colour of it, since a hatch would run through it."""
    ground = {"facecolor": KIND_COLOURS[kind], "edgecolor": "none", "pad": 0.2}
    # Black, not INK: the report makes INK light on a dark page, where boxes keep their colours.
    ink = "white" if kind in _DARK else "black"
    axes.text(*place, text, ha="center", va="center_baseline", clip_on=True, color=ink, bbox=ground)


def _label(axes: Axes, step: DrawnStep, tops: dict[int, float]) -> None:
    """Number and idle share of the partitions, as many as there is room for."""
    idle, place = step.idle(), axes.get_yaxis_transform()
    every = -(-len(tops) // 16)
    shown = [partition for partition in tops if partition % every == 0]
    middles = [tops[partition] + _LANE_IN["compute"] / 2 for partition in shown]
    axes.set_yticks(middles, [str(partition) for partition in shown])
    axes.tick_params(axis="y", length=0)
    for partition, middle in zip(shown, middles, strict=True):
        axes.text(1.005, middle, f"{idle[partition]:.0%}", transform=place, va="center_baseline", color=FAINT)


TIMELINES: Final = Figure(
    name="timelines",
    caption=(
        "One training step of each published variant on one axis of time: a row per partition, computation above "
        "copies. Numbers in boxes are micro-batches, those at the right the share of time that the partition idles."
    ),
    sources=("", "_events"),
    read=_read,
    panels=_panels,
    width_in=PAGE_IN,
)
