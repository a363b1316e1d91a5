"""One step of each schedule, above and beside each other on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from gpipe_bench.figures.chart import KIND_COLOURS
from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.schedules import ScheduleCell, read_cells
from gpipe_bench.figures.style import BOTH_IN, FAINT, OKABE_ITO
from gpipe_bench.figures.tables import read_events
from gpipe_bench.figures.text import significant
from gpipe_bench.results.timeline import COMPUTE_KINDS, TimelineEvent
from gpipe_bench.schedules import SCHEDULES, Schedule, in_flight, named_schedule

_COLUMNS: Final = 2
_LANE_IN: Final = 0.095
_TITLE_IN: Final = 0.16
_GAP_IN: Final = 0.08
_AXIS_IN: Final = 0.34
_LEFT_IN: Final = 0.10


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a schedule, and where its partitions are."""

    cell: ScheduleCell
    events: Sequence[TimelineEvent]

    @property
    def homes(self) -> Sequence[int]:
        """The device of each partition."""
        return self._schedule(1).placement

    @property
    def words(self) -> str:
        """Its name and numbers."""
        row = self.cell.row
        schedule = self._schedule(row.microbatches or 1)
        halves = " halves" if len(schedule.placement) > len(schedule.devices) else ""
        parts = [f"{significant(self.cell.throughput)} samples/s", f"{significant(self.cell.memory_gib)} GiB"]
        return f"{row.schedule}: {', '.join(parts)}, {max(in_flight(schedule))}{halves} in flight"

    def _schedule(self, m: int) -> Schedule:
        n = self.cell.row.partitions or 1
        return named_schedule(self.cell.row.schedule, m, n, self.cell.devices)


def read_steps(rows_csv: Path) -> list[Step]:
    """The steps of a table of rows with a table of events beside it, in the order of the schedules.

    Raises:
        ConfigError: a table cannot be read, or lacks a column.
    """
    events: dict[str, list[TimelineEvent]] = {}
    for record in read_events(rows_csv.with_name(f"{rows_csv.stem}_events.csv")):
        events.setdefault(record.cell, []).append(record.event)
    cells = {cell.row.schedule: cell for cell in read_cells(rows_csv) if cell.row.cell in events}
    return [Step(cells[name], events[cells[name].row.cell]) for name in SCHEDULES if name in cells]


def steps_figure(steps: Sequence[Step]) -> Figure:
    """The figure of some steps, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page(BOTH_IN)
    row = steps[0].cell.row
    sizes = f"{row.microbatches} micro-batches on {steps[0].cell.devices} devices ({row.profile})"
    page.heading(f"{row.model}: one training step of each schedule, {sizes}", row.evidence)
    longest_ms = max(event.end_us for step in steps for event in step.events) / 1000
    half = -(-len(steps) // _COLUMNS)
    for k in range(half):
        page.space(_GAP_IN / 2)
        beside = steps[k::half]
        last = k == half - 1
        height = _TITLE_IN + max(step.cell.devices for step in beside) * _LANE_IN + (_AXIS_IN if last else 0)
        page.strip(height, partial(_draw, steps=beside, longest_ms=longest_ms, axis=last))
    kinds = [kind for kind in COMPUTE_KINDS if any(event.kind == kind for step in steps for event in step.events)]
    handles = [Patch(facecolor=KIND_COLOURS[kind], label=kind.replace("_", " ")) for kind in kinds]
    page.strip(0.16, lambda frame: frame.legend(handles, len(handles), handlelength=1.4, columnspacing=1.6))
    page.paragraph("A row is a device; dark edge: its second partition. Copies are left out.", colour=FAINT)
    return page.render()


def _draw(frame: Frame, steps: Sequence[Step], longest_ms: float, *, axis: bool) -> None:
    pitch = BOTH_IN / _COLUMNS
    for column, step in enumerate(steps):
        left, height = column * pitch + _LEFT_IN, step.cell.devices * _LANE_IN
        frame.text(left, 0.02, step.words)
        axes = frame.axes(left, pitch - 2 * _LEFT_IN, _TITLE_IN, height)
        axes.set(xlim=(0, longest_ms), ylim=(step.cell.devices, 0), yticks=[])
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="x", labelbottom=axis)
        if axis:
            axes.set_xlabel("time (ms)")
        _draw_boxes(axes, step)


def _draw_boxes(axes: Axes, step: Step) -> None:
    start = min(event.start_us for event in step.events) / 1000
    end = max(event.end_us for event in step.events) / 1000
    homes = step.homes
    for device in range(step.cell.devices):
        axes.add_patch(Rectangle((start, device), end - start, 0.9, facecolor="#EEEEEE", linewidth=0))
    boxes: dict[str, list[Rectangle]] = {}
    for event in (event for event in step.events if event.kind in COMPUTE_KINDS):
        place, length = event.start_us / 1000, (event.end_us - event.start_us) / 1000
        boxes.setdefault(event.kind, []).append(Rectangle((place, homes[event.partition]), length, 0.9))
        if event.partition != homes[event.partition]:
            edge = Rectangle((place, homes[event.partition] + 0.7), length, 0.2)
            boxes.setdefault("", []).append(edge)
    for kind, some in boxes.items():
        fill, order = KIND_COLOURS.get(kind, OKABE_ITO["black"]), 2 if kind else 3
        axes.add_collection(PatchCollection(some, facecolor=fill, edgecolor="white", linewidth=0.2, zorder=order))
