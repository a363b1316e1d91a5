"""Each action of a schedule: when it was predicted to run, when it ran, and by how much it was late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from gpipe_bench.figures.base import PAGE_IN, Panel, Rows, heading, lay_out, legend, note
from gpipe_bench.figures.style import INK, OKABE_ITO, RULE
from gpipe_bench.figures.timelines import KIND_COLOURS
from gpipe_bench.schedules.comparison import ActionTimes

_NAMES: Final = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "backward_inputs",
    "W": "backward_weights",
}
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
    height = min(_devices(data), _MOST_LANES) * _LANE_IN
    kinds = [kind for kind in _NAMES if any(row.action.kind == kind for row in data.rows)]
    handles = [Patch(facecolor=KIND_COLOURS[_NAMES[kind]], label=_NAMES[kind].replace("_", " ")) for kind in kinds]
    rows: Rows = [
        heading(data.title, [data.evidence], f"predicted {data.predicted}", PAGE_IN),
        [Panel(partial(_draw_steps, actual=False), data, height)],
        [Panel(partial(_draw_steps, actual=True), data, height)],
        [Panel(_draw_late, data, _LATE_IN)],
        legend(handles, len(handles)),
        note("Late: start of each action, after its prediction.", PAGE_IN),
    ]
    if data.parting:
        words = f"Dashed: the two part ways at {data.parting.action} on device {data.parting.device}."
        rows.append(note(words, PAGE_IN))
    return lay_out(rows, PAGE_IN)


def _draw_steps(axes: Axes, data: ActionFigure, *, actual: bool) -> None:
    axes.set(xlim=(0, _longest_ms(data)), ylim=(_devices(data), 0), yticks=[])
    axes.set_ylabel(data.evidence if actual else "predicted")
    axes.tick_params(axis="x", labelbottom=False)
    for kind, name in _NAMES.items():
        own = [row for row in data.rows if row.action.kind == kind]
        spans = [(row.device, *(row.actual if actual else row.predicted)) for row in own]
        boxes = [Rectangle((start, device), end - start, 0.9) for device, start, end in spans]
        axes.add_collection(PatchCollection(boxes, facecolor=KIND_COLOURS[name], edgecolor="white", linewidth=0.2))
    _mark(axes, data, actual=actual)


def _draw_late(axes: Axes, data: ActionFigure) -> None:
    axes.grid(axis="y", linewidth=0.3, color=RULE)
    colours = list(OKABE_ITO.values())
    for device in range(_devices(data)):
        own = [row for row in data.rows if row.device == device]
        late = [row.late_ms for row in own]
        axes.plot([row.predicted[0] for row in own], late, ".-", ms=2, lw=0.5, color=colours[device % len(colours)])
    axes.set(xlim=(0, _longest_ms(data)), xlabel="time (ms)", ylabel="late (ms)")
    _mark(axes, data, actual=False)


def _devices(data: ActionFigure) -> int:
    return 1 + max(row.device for row in data.rows)


def _longest_ms(data: ActionFigure) -> float:
    return max(max(row.predicted[1], row.actual[1]) for row in data.rows)


def _mark(axes: Axes, data: ActionFigure, *, actual: bool) -> None:
    if data.parting:
        place = (data.parting.actual if actual else data.parting.predicted)[0]
        axes.axvline(place, color=INK, linestyle="--", linewidth=0.7)
