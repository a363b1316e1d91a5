"""One step of a pipeline as a Gantt chart: what ran when in each partition, and where it idled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Patch, Rectangle

from gpipe_bench.figures.lanes import Box, lane_keys, stack
from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.style import FAINT, FONT_PT, INK, OKABE_ITO, WIDTH_IN
from gpipe_bench.figures.text import significant, text_width_pt
from gpipe_bench.results.breakdown import split_device_time
from gpipe_bench.results.timeline import KINDS, TimelineEvent
from gpipe_bench.schedules.cycles import ideal_bubble

# Fill and hatch of each kind. What belongs to the backward pass is hatched, and a gradient darker than what it is the
# gradient of, so that boxes too narrow for a hatch differ too, also in grey.
_LOOK: Final = {
    "forward": (OKABE_ITO["sky"], ""),
    "recompute": (OKABE_ITO["yellow"], "------"),
    "backward": (OKABE_ITO["orange"], "/////"),
    "backward_inputs": ("#F5B942", "/////"),
    "backward_weights": ("#B87400", "\\\\\\\\\\"),
    "copy": (OKABE_ITO["purple"], ""),
    "copy_grad": ("#8C4470", "/////"),
    "portal": (OKABE_ITO["green"], ""),
    "portal_grad": ("#00563F", "/////"),
}
KIND_COLOURS: Final = {kind: colour for kind, (colour, _) in _LOOK.items()}
"""Fill of each kind of task."""

_DARK: Final = ("copy_grad", "portal_grad")
_IDLE: Final = "#E6E6E6"
_UNUSED: Final = "#F6F6F6"
_LEFT_IN: Final = 0.70
_SHORT_IN: Final = 0.36
_RIGHT_IN: Final = 0.34
_LANE_IN: Final = {"compute": 0.24, "copy": 0.15}
_GAP_IN: Final = 0.05
_LOW: Final = 0.75
# In a narrower box, edge and hatch would hide the colour.
_HATCHED_FROM_PT: Final = 2.5
_RIM_PT: Final = 0.4
_HIGHEST_IN: Final = 6.0
_LONG_NAME: Final = 12


class Chart:
    """The geometry of one chart: lanes from top to bottom in inches, time in milliseconds.

    Args:
        events: of one step.
        axis_us: how long its axis of time is, in microseconds; as long as the step by default.
        short: low lanes, and partitions named by their numbers alone, for several charts in one column.
    """

    def __init__(self, events: Sequence[TimelineEvent], axis_us: float | None = None, *, short: bool = False) -> None:
        self.events = events
        # A host that runs ahead issues before the step begins, at the zero of the record.
        issued_us = max(min(event.issue_us for event in events), 0.0)
        self.start_us = min(issued_us, *(event.start_us for event in events))
        self.end_us = max(event.end_us for event in events)
        self.span_us = max(self.end_us - self.start_us, 1e-3)
        self.short = short
        self.left_in = _SHORT_IN if short else _LEFT_IN
        self.width_in = WIDTH_IN - self.left_in - _RIGHT_IN
        self.axis_us = axis_us or self.span_us
        self.lanes = lane_keys(events)
        self.lane_events: dict[tuple[int, str], list[TimelineEvent]] = {lane: [] for lane in self.lanes}
        for event in events:
            self.lane_events[event.partition, event.stream].append(event)
        self.kinds = [kind for kind in KINDS if any(event.kind == kind for event in events)]
        self.partitions = max(event.partition for event in events) + 1
        self.microbatches = max(event.microbatch for event in events) + 1
        natural = sum(_LANE_IN[stream] for _, stream in self.lanes) + self.partitions * _GAP_IN
        self.scale = min(_LOW if short else 1.0, _HIGHEST_IN / natural)
        self.height_in = natural * self.scale
        self.points_per_us = self.width_in * 72 / self.axis_us

    def places(self) -> list[tuple[int, str, float, float]]:
        """``(partition, stream, top, height)`` of each lane, in inches below the top of the chart."""
        placed, top = [], 0.0
        for k, (partition, stream) in enumerate(self.lanes):
            if k and partition != self.lanes[k - 1][0]:
                top += _GAP_IN * self.scale
            height = _LANE_IN[stream] * self.scale
            placed.append((partition, stream, top, height))
            top += height
        return placed

    def idle_fractions(self) -> list[float]:
        """Share of the step in which neither a computation nor a copy of the partition ran."""
        shares = split_device_time(self.events, self.partitions, self.start_us, self.start_us + self.span_us)
        return [share.bubble_fraction + share.imbalance_fraction for share in shares]


def add_chart(page: Page, events: Sequence[TimelineEvent], step: str) -> None:
    """Add a summary of one step, called ``step``, its chart and the legend to a page."""
    chart = Chart(events)
    idle = chart.idle_fractions()
    page.paragraph(
        f"{step}: {significant(chart.span_us / 1000)} ms; "
        f"idle {sum(idle) / len(idle):.0%}, ideal bubble {ideal_bubble(chart.microbatches, chart.partitions):.0%}",
        colour=FAINT,
    )
    page.space(0.14)
    page.strip(chart.height_in + 0.30, lambda frame: draw_chart(frame, chart, idle))
    page.space(0.04)
    page.strip(legend_height_in(chart.kinds), lambda frame: draw_legend(frame, chart.kinds))


def draw_chart(frame: Frame, chart: Chart, idle: Sequence[float], *, axis: bool = True) -> None:
    """Draw a chart.

    Args:
        frame: a strip of the chart's height, and 0.3 inches for the axis.
        chart: what to draw.
        idle: share of the step that each partition idles.
        axis: whether to draw the axis of time.
    """
    axes = frame.axes(chart.left_in, chart.width_in, 0.0, chart.height_in)
    axes.set(xlim=(0, chart.axis_us / 1000), ylim=(chart.height_in, 0), yticks=[])
    if axis:
        axes.set_xlabel("time since the start of the step (ms)")
    else:
        axes.tick_params(axis="x", labelbottom=False)
    axes.spines["left"].set_visible(False)
    shapes: dict[tuple[str, bool], list[Rectangle]] = {}
    for partition, stream, top, height in chart.places():
        ground = _IDLE if stream == "compute" else _UNUSED
        axes.add_patch(Rectangle((0, top), chart.span_us / 1000, height, facecolor=ground, linewidth=0))
        for box in stack(chart.lane_events[partition, stream], chart.span_us):
            wide = (box.event.end_us - box.event.start_us) * chart.points_per_us >= _HATCHED_FROM_PT
            shapes.setdefault((box.event.kind, wide), []).append(_rectangle(chart, box, top, height))
            _number_box(axes, chart, box, top, height)
    for (kind, wide), boxes in sorted(shapes.items()):
        axes.add_collection(PatchCollection(boxes, **_look(kind, wide=wide)))
    _label_lanes(axes, chart, idle)


def _look(kind: str, *, wide: bool) -> dict[str, Any]:
    fill, hatch = _LOOK[kind]
    if wide:
        ink = "white" if kind in _DARK else INK
        return {"facecolor": fill, "edgecolor": ink, "linewidth": 0.25, "hatch": hatch}
    return {"facecolor": fill, "edgecolor": fill, "linewidth": 0.15}


def _rectangle(chart: Chart, box: Box, top: float, height: float) -> Rectangle:
    event, share = box.event, height / box.tracks
    start = (event.start_us - chart.start_us) / 1000
    return Rectangle((start, top + box.track * share), (event.end_us - event.start_us) / 1000, share)


def _number_box(axes: Axes, chart: Chart, box: Box, top: float, height: float) -> None:
    """The micro-batch in the middle of its box, where the box is large enough for it."""
    text, share = str(box.event.microbatch), height / box.tracks
    width_pt = (box.event.end_us - box.event.start_us) * chart.points_per_us
    if width_pt < text_width_pt(text) + _RIM_PT or share * 72 < FONT_PT + 1:
        return
    middle = ((box.event.start_us + box.event.end_us) / 2 - chart.start_us) / 1000
    # A white rim keeps the number legible on a hatch.
    axes.text(
        middle,
        top + (box.track + 0.5) * share,
        text,
        ha="center",
        va="center_baseline",
        clip_on=True,
        path_effects=[patheffects.withStroke(linewidth=1.6, foreground="white")],
    )


def _label_lanes(axes: Axes, chart: Chart, idle: Sequence[float]) -> None:
    left, right = -4 / (chart.width_in * 72), 1 + 4 / (chart.width_in * 72)
    place = axes.get_yaxis_transform()
    pitch_pt = chart.height_in * 72 / chart.partitions
    every = -(-int(FONT_PT + 2) // max(int(pitch_pt), 1))
    roomy = _LANE_IN["copy"] * chart.scale * 72 >= FONT_PT + 1
    for partition, stream, top, height in chart.places():
        middle = top + height / 2
        if stream == "compute" and partition % every == 0:
            name = f"{partition} {stream}" if roomy and not chart.short else f"{partition}"
            axes.text(left, middle, name, transform=place, ha="right", va="center")
            axes.text(right, middle, f"{idle[partition]:.0%}", transform=place, ha="left", va="center")
        elif stream == "copy" and roomy:
            axes.text(left, middle, stream, transform=place, ha="right", va="center", color=FAINT)
    axes.text(right, -0.03, "idle", transform=place, ha="left", va="bottom", color=FAINT)
    over = "part." if chart.short else "partition"
    axes.text(left, -0.03, over, transform=place, ha="right", va="bottom", color=FAINT)


def _legend_columns(kinds: Sequence[str]) -> int:
    return 3 if max(map(len, kinds)) > _LONG_NAME else 4


def legend_height_in(kinds: Sequence[str]) -> float:
    """Height of the legend of some kinds of tasks, in inches."""
    return 0.15 * -(-(len(kinds) + 1) // _legend_columns(kinds))


def draw_legend(frame: Frame, kinds: Sequence[str]) -> None:
    """Draw the legend of some kinds of tasks."""
    handles = [Patch(label=kind.replace("_", " "), **_look(kind, wide=True)) for kind in kinds]
    handles.append(Patch(facecolor=_IDLE, edgecolor="none", label="idle"))
    spacing = {
        "handlelength": 1.8,
        "handleheight": 0.9,
        "columnspacing": 1.0,
        "handletextpad": 0.4,
        "labelspacing": 0.3,
    }
    frame.legend(handles, _legend_columns(kinds), **spacing)
