"""One step of each schedule, above and beside each other on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Final

from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from gpipe_bench.drawing.colours import KIND_COLOURS, KIND_WORDS, later
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.base import PAGE_IN, Figure, Panel, Rows, Selection, heading, legend, note
from gpipe_bench.figures.schedules import ScheduleCell, read_cells
from gpipe_bench.figures.tables import read_events
from gpipe_bench.figures.text import significant, times
from gpipe_bench.results.timeline import COMPUTE_KINDS, TimelineEvent
from gpipe_bench.schedules import SCHEDULES, Schedule, in_flight, named_schedule

_COLUMNS: Final = 2
_LANE_IN: Final = 0.095
_IDLE: Final = "#EEEEEE"
_OVERLAP: Final = "Steps overlap: what begins before 0 ran while other devices ended the step before."


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """One step of a schedule, and where its partitions are."""

    cell: ScheduleCell
    events: Sequence[TimelineEvent]

    @property
    def placement(self) -> Sequence[int]:
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


def _read(rows_csv: FilePath, selection: Selection) -> list[ScheduleStep]:
    """The steps of a table of rows with a table of events beside it, in the order of the schedules."""
    events: dict[str, list[TimelineEvent]] = {}
    for record in read_events(rows_csv.with_name(f"{rows_csv.stem}_events.csv")):
        if selection.evidence in ("", record.evidence):
            events.setdefault(record.cell, []).append(record.event)
    cells = {cell.row.schedule: cell for cell in read_cells(rows_csv, selection.evidence) if cell.row.cell in events}
    if not cells:
        raise ConfigError([f"events must be those of rows that ended well, got none of {rows_csv}; run them first"])
    return [ScheduleStep(cells[name], events[cells[name].row.cell]) for name in SCHEDULES if name in cells]


def _panels(steps: Sequence[ScheduleStep], width_in: float) -> Rows:
    row = steps[0].cell.row
    sizes = f"{row.microbatches} micro-batches on {steps[0].cell.devices} devices ({row.profile})"
    events = [event for step in steps for event in step.events]
    # Where steps overlap, a step begins while the one before it ends, at 0.
    span_ms = min(0.0, *(event.start_us / 1000 for event in events)), max(event.end_us for event in events) / 1000
    half = -(-len(steps) // _COLUMNS)
    kinds = [kind for kind in COMPUTE_KINDS if any(event.kind == kind for step in steps for event in step.events)]
    handles = [Patch(facecolor=KIND_COLOURS[kind], label=KIND_WORDS[kind]) for kind in kinds]
    if any(len(step.placement) > step.cell.devices for step in steps):
        handles.append(Patch(facecolor=later(KIND_COLOURS[kinds[0]]), label="darker: second partition of the device"))
    handles.append(Patch(facecolor=_IDLE, label="idle"))
    return [
        heading(_finding(steps), [row.evidence], sizes, width_in),
        *(_row(steps, k, half, span_ms) for k in range(half)),
        legend(handles, len(handles)),
        note(f"A row is a device. Copies are left out. {_OVERLAP if span_ms[0] < 0 else ''}".strip(), width_in),
    ]


def _finding(steps: Sequence[ScheduleStep]) -> str:
    """The schedules of the shortest step, over 1F1B where it is among them."""
    cells = {step.cell.row.schedule: step.cell for step in steps}
    best = max(cells.values(), key=lambda cell: cell.throughput)
    model, name, base = best.row.model, best.row.schedule, cells.get("1f1b")
    if base is None or base is best:
        return f"{model}: {name} is the fastest of {len(cells)} schedules"
    speed, memory = times(best.throughput / base.throughput), times(best.memory_gib / base.memory_gib)
    return f"{model}: {name} trains {speed} as fast as 1f1b, in {memory} its memory"


def _row(steps: Sequence[ScheduleStep], k: int, rows: int, span_ms: tuple[float, float]) -> Sequence[Panel]:
    """Row k of so many; the panels of the last one have the numbers of the axis, also one without a step."""
    height = steps[0].cell.devices * _LANE_IN
    own: list[ScheduleStep | None] = [*steps[k::rows]]
    own += [None] * (min(_COLUMNS, len(steps)) - len(own))
    return [Panel(partial(_draw, span_ms=span_ms, last=k == rows - 1), step, height) for step in own]


def _draw(axes: Axes, step: ScheduleStep | None, span_ms: tuple[float, float], *, last: bool) -> None:
    axes.set(xlim=span_ms, yticks=[])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", labelbottom=last)
    if last:
        axes.set_xlabel("time (ms)")
    if step:
        axes.set_title(step.words, fontsize="medium", loc="left", pad=2)
        axes.set_ylim(step.cell.devices, 0)
        _draw_boxes(axes, step)


def _draw_boxes(axes: Axes, step: ScheduleStep) -> None:
    start = min(event.start_us for event in step.events) / 1000
    end = max(event.end_us for event in step.events) / 1000
    placement = step.placement
    for device in range(step.cell.devices):
        axes.add_patch(Rectangle((start, device), end - start, 0.9, facecolor=_IDLE, linewidth=0))
    boxes: dict[str, list[Path]] = {}
    for event in (event for event in step.events if event.kind in COMPUTE_KINDS):
        place, length, lane = event.start_us / 1000, (event.end_us - event.start_us) / 1000, placement[event.partition]
        fill = KIND_COLOURS[event.kind] if event.partition == lane else later(KIND_COLOURS[event.kind])
        boxes.setdefault(fill, []).append(_box(place, lane, length, 0.9))
    for fill, some in boxes.items():
        # One shape for all of one colour, for a small file.
        shape = Path.make_compound_path(*some)
        axes.add_patch(PathPatch(shape, facecolor=fill, edgecolor="white", linewidth=0.2, zorder=2))


def _box(left: float, top: float, width: float, height: float) -> Path:
    return Path.unit_rectangle().transformed(Affine2D().scale(width, height).translate(left, top))


STEPS: Final = Figure(
    name="schedules_timelines",
    caption=(
        "One training step of each schedule on one axis of time. A row is a device; darker: its second partition. "
        "Copies are left out. Where steps overlap, what begins before 0 ran while the step before ended."
    ),
    sources=("", "_devices", "_events"),
    read=_read,
    panels=_panels,
    width_in=PAGE_IN,
)
