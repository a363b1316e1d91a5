"""Each action of a schedule: when it was predicted to run, when it ran, and by how much it was late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from gpipe_bench.figures.chart import KIND_COLOURS
from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.style import BOTH_IN, FAINT, INK, OKABE_ITO, RULE
from gpipe_bench.schedules.comparison import ActionTimes

_NAMES: Final = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "backward_inputs",
    "W": "backward_weights",
}
_LEFT_IN: Final = 0.62
_LANE_IN: Final = 0.13
_LATE_IN: Final = 0.9
_MOST_LANES: Final = 10


@dataclass(frozen=True, slots=True)
class ActionFigure:
    """What is drawn.

    Attributes:
        rows: the actions, in the order of their predicted starts.
        parting: the first one whose prediction is wrong; None if none is.
        title: what ran.
        predicted: what the prediction is made from.
        evidence: kind of the run.
    """

    rows: Sequence[ActionTimes]
    parting: ActionTimes | None
    title: str
    predicted: str
    evidence: str


def action_figure(data: ActionFigure) -> Figure:
    """The figure, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page(BOTH_IN)
    page.heading(data.title, data.evidence)
    devices = 1 + max(row.device for row in data.rows)
    height = devices * _LANE_IN * min(1.0, _MOST_LANES / devices)
    page.strip(3 * 0.12 + 2 * height + _LATE_IN + 0.36, lambda frame: _draw(frame, data, devices, height))
    kinds = [kind for kind in _NAMES if any(row.action.kind == kind for row in data.rows)]
    handles = [Patch(facecolor=KIND_COLOURS[_NAMES[kind]], label=_NAMES[kind].replace("_", " ")) for kind in kinds]
    page.strip(0.16, lambda frame: frame.legend(handles, len(handles), handlelength=1.4, columnspacing=1.6))
    page.paragraph(f"Predicted {data.predicted}. Late: start of each action, after its prediction.", colour=FAINT)
    if data.parting:
        page.paragraph(f"Dashed: the two part ways at {data.parting.action} on device {data.parting.device}.")
    return page.render()


def _draw(frame: Frame, data: ActionFigure, devices: int, height: float) -> None:
    longest = max(max(row.predicted[1], row.actual[1]) for row in data.rows)
    top = 0.04
    for name, actual in (("predicted", False), (data.evidence, True)):
        axes = frame.axes(_LEFT_IN, BOTH_IN - _LEFT_IN - 0.1, top, height)
        axes.set(xlim=(0, longest), ylim=(devices, 0), yticks=[], ylabel=name)
        axes.tick_params(axis="x", labelbottom=False)
        for kind, colour in ((kind, KIND_COLOURS[name]) for kind, name in _NAMES.items()):
            own = [row for row in data.rows if row.action.kind == kind]
            spans = [(row.device, *(row.actual if actual else row.predicted)) for row in own]
            boxes = [Rectangle((start, device), end - start, 0.9) for device, start, end in spans]
            axes.add_collection(PatchCollection(boxes, facecolor=colour, edgecolor="white", linewidth=0.2))
        _mark(axes, data, actual=actual)
        top += height + 0.12
    axes = frame.axes(_LEFT_IN, BOTH_IN - _LEFT_IN - 0.1, top, _LATE_IN)
    axes.grid(axis="y", linewidth=0.3, color=RULE)
    colours = list(OKABE_ITO.values())
    for device in range(devices):
        own = [row for row in data.rows if row.device == device]
        late = [row.late_ms for row in own]
        axes.plot([row.predicted[0] for row in own], late, ".-", ms=2, lw=0.5, color=colours[device % len(colours)])
    axes.set(xlim=(0, longest), xlabel="time (ms)", ylabel="late (ms)")
    _mark(axes, data, actual=False)


def _mark(axes: Axes, data: ActionFigure, *, actual: bool) -> None:
    if data.parting:
        place = (data.parting.actual if actual else data.parting.predicted)[0]
        axes.axvline(place, color=INK, linestyle="--", linewidth=0.7)
