"""Schedules beside each other: throughput over the memory of the fullest device, and over numbers of devices.

Of the cells of one model on one type of device the Pareto front has those that no other cell beats in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.ablation import Mark
from gpipe_bench.figures.base import PAGE_IN, Figure, Panel, Rows, Selection, heading, legend, note
from gpipe_bench.figures.style import FAINT, OKABE_ITO, RULE
from gpipe_bench.figures.tables import read_rows
from gpipe_bench.results.labels import training_words
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import read_table
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.table import device_count

MARKS: Final = dict(
    zip(
        SCHEDULES,
        (
            Mark("o", OKABE_ITO["black"], 4.0),
            Mark("s", OKABE_ITO["orange"], 3.8),
            Mark("^", OKABE_ITO["sky"], 4.4),
            Mark("v", OKABE_ITO["blue"], 4.4),
            Mark("<", OKABE_ITO["sky"], 4.4),
            Mark(">", OKABE_ITO["blue"], 4.4),
            Mark("P", OKABE_ITO["green"], 4.6),
            Mark("D", OKABE_ITO["green"], 3.8),
            Mark("d", OKABE_ITO["green"], 4.4),
            Mark("X", OKABE_ITO["vermilion"], 4.6),
            Mark("p", OKABE_ITO["purple"], 4.6),
            Mark("h", OKABE_ITO["purple"], 4.6),
            Mark("*", OKABE_ITO["vermilion"], 5.6),
        ),
        strict=True,
    )
)
"""Shape and colour of each schedule."""

_FAMILIES: Final = "Schedules of one family have one colour; shapes tell them apart."
_FILLS: Final = {"never": "full", "except_last": "left", "always": "none"}
_COLUMNS: Final = 5
_TICKS: Final = (0.2, 0.5, 1, 2, 5, 10, 20, 50)
_HEIGHT_IN: Final = 1.3


@dataclass(frozen=True, slots=True)
class ScheduleCell:
    """A row that ended well.

    Attributes:
        row: that row.
        memory_gib: peak reserved memory of the fullest device.
    """

    row: Row
    memory_gib: float

    @property
    def devices(self) -> int:
        """p, of the schedule."""
        return device_count(self.row.schedule, self.row.partitions or 1)

    @property
    def throughput(self) -> float:
        """In samples per second."""
        return self.row.throughput_samples_per_s or 0.0


def read_cells(rows_csv: Path, evidence: str = "") -> list[ScheduleCell]:
    """The rows of an experiment that ended well, with the memory of their devices from the table beside them.

    Args:
        rows_csv: the table.
        evidence: the kind of the rows; all if empty.

    Raises:
        ConfigError: a table cannot be read, lacks a column, or has no such row.
    """
    table = read_table(rows_csv.with_name(f"{rows_csv.stem}_devices.csv"), ("cell", "repeat", "peak_reserved_gib"))
    fullest = table.groupby(["cell", "repeat"])["peak_reserved_gib"].max().to_dict()
    rows = [row for row in read_rows(rows_csv) if row.status == "ok" and evidence in ("", row.evidence)]
    if not rows:
        which = f"{evidence} rows" if evidence else "rows"
        raise ConfigError([f"table must have {which} that ended well, got none in {rows_csv}; run them first"])
    return [ScheduleCell(row, float(fullest.get((row.cell, row.repeat or 0), 0.0))) for row in rows]


def pareto(cells: Iterable[ScheduleCell]) -> list[ScheduleCell]:
    """The cells that no other one beats in throughput and memory, from small to large; of equal ones the first."""
    front: list[ScheduleCell] = []
    for cell in sorted(cells, key=lambda one: (one.memory_gib, -one.throughput)):
        if not front or cell.throughput > front[-1].throughput:
            front.append(cell)
    return front


def _pareto_panels(cells: Sequence[ScheduleCell], width_in: float) -> Rows:
    """A panel for each model and type of device, on the devices that most cells have."""
    every = _groups(cells)
    groups = {name: [cell for cell in group if cell.devices == _usual(group)] for name, group in every.items()}
    counts = sorted({_usual(group) for group in groups.values()})
    words = f"on {' or '.join(map(str, counts))} devices, in samples/s, over the peak memory of the fullest device"
    *less, most = sorted({cell.row.chunks or 1 for group in groups.values() for cell in group})
    mixed = f"Panels hold cells of {', '.join(map(str, less))} and {most} micro-batches alike. " if less else ""
    fills = "Full: no checkpoints; half: except the last micro-batch; empty: always. "
    return [
        heading(f"Throughput {words}", [cells[0].row.evidence], "", width_in),
        *_rows(groups, _draw_pareto, "GiB reserved"),
        _marks(),
        note(fills + mixed + _FAMILIES, width_in),
    ]


def _scaling_panels(cells: Sequence[ScheduleCell], width_in: float) -> Rows:
    """A panel for each model and type of device, over numbers of devices."""
    groups = {name: group for name, every in _groups(cells).items() if (group := _alike(every))}
    heads = [group[0].row for group in groups.values()]
    modes = " or ".join(dict.fromkeys(f"{row.chunks} micro-batches, checkpoint {row.checkpoint}" for row in heads))
    return [
        heading("Throughput over that of 1F1B, with more devices", [cells[0].row.evidence], modes, width_in),
        *_rows(groups, _draw_scaling, "devices"),
        _marks(),
        note(_FAMILIES, width_in),
    ]


def _groups(cells: Iterable[ScheduleCell]) -> dict[str, list[ScheduleCell]]:
    """The cells by model, type of device and how they train."""
    found: dict[str, list[ScheduleCell]] = {}
    for cell in cells:
        words = training_words(cell.row)
        name = f"{cell.row.model}, {cell.row.profile or 'here'}" + (f"\n{words}" if words else "")
        found.setdefault(name, []).append(cell)
    return found


def _usual(cells: Sequence[ScheduleCell]) -> int:
    return Counter(cell.devices for cell in cells).most_common(1)[0][0]


def _alike(cells: Sequence[ScheduleCell]) -> list[ScheduleCell]:
    """The cells of the setting that was simulated on most numbers of devices; none if it is a single one."""
    settings: dict[tuple[Any, ...], list[ScheduleCell]] = {}
    for cell in cells:
        settings.setdefault((cell.row.chunks, cell.row.checkpoint), []).append(cell)
    most = max(settings.values(), key=lambda group: len({cell.devices for cell in group}))
    return most if len({cell.devices for cell in most}) > 1 else []


def _rows(
    groups: Mapping[str, Sequence[ScheduleCell]], draw: Callable[[Axes, Sequence[ScheduleCell]], None], label: str
) -> Rows:
    """A panel for each group, five beside each other."""

    def drawn(axes: Axes, named: tuple[str, Sequence[ScheduleCell]]) -> None:
        axes.set_title(named[0], fontsize="medium", pad=3)
        axes.grid(linewidth=0.3, color=RULE)
        axes.set_axisbelow(True)
        axes.set_xlabel(label)
        draw(axes, named[1])

    panels = [Panel(drawn, named, _HEIGHT_IN) for named in groups.items()]
    return [panels[start : start + _COLUMNS] for start in range(0, len(panels), _COLUMNS)]


def _draw_pareto(axes: Axes, cells: Sequence[ScheduleCell]) -> None:
    front = pareto(cells)
    axes.step([cell.memory_gib for cell in front], [cell.throughput for cell in front], where="post", color=FAINT)
    for cell in [*cells, *front]:
        style = mark_style(cell.row.schedule, _FILLS[cell.row.checkpoint])
        if cell not in front:
            style |= {"markersize": 2.2, "markeredgewidth": 0.4}
        axes.plot(cell.memory_gib, cell.throughput, **style, clip_on=False, zorder=3)
    axes.set_xscale("log")
    low, high = (pick(cell.memory_gib for cell in cells) for pick in (min, max))
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)


def _draw_scaling(axes: Axes, cells: Sequence[ScheduleCell]) -> None:
    base = {cell.devices: cell.throughput for cell in cells if cell.row.schedule == "1f1b"}
    counts = sorted(base)
    for name in SCHEDULES:
        own = {cell.devices: cell.throughput for cell in cells if cell.row.schedule == name}
        ratios = [own[p] / base[p] if p in own else float("nan") for p in counts]
        axes.plot(range(len(counts)), ratios, **{**mark_style(name), "linestyle": "-"}, linewidth=0.5)
    axes.set_xticks(range(len(counts)), [str(p) for p in counts])


def mark_style(name: str, fill: str = "full") -> dict[str, Any]:
    """Arguments of ``plot`` for the mark of a schedule."""
    mark = MARKS[name]
    edge = {"markeredgecolor": mark.colour, "markeredgewidth": 0.6}
    colours = {"color": mark.colour, "markerfacecoloralt": "white", **edge}
    return {"marker": mark.shape, "markersize": mark.size_pt, "fillstyle": fill, "linestyle": "none", **colours}


def _marks() -> list[Panel]:
    """The marks of all schedules."""
    return legend([Line2D([], [], label=name, **mark_style(name)) for name in SCHEDULES], 6)


def _read(path: Path, selection: Selection) -> list[ScheduleCell]:
    """The cells whose steps overlap."""
    return [cell for cell in read_cells(path, selection.evidence or "simulated") if cell.row.steps_overlap is not False]


PARETO: Final = Figure(
    name="schedules_pareto",
    caption=(
        "Throughput of every schedule over the peak memory of the fullest device. Line and large marks: the Pareto "
        "front. Small marks: cells that another one beats in both."
    ),
    sources=("", "_devices"),
    read=_read,
    panels=_pareto_panels,
    width_in=PAGE_IN,
)
SCALING: Final = Figure(
    name="schedules_scaling",
    caption=(
        "Throughput of every schedule over that of 1F1B, over the number of devices. A gap: the schedule does not fit "
        "the memory."
    ),
    sources=("", "_devices"),
    read=_read,
    panels=_scaling_panels,
    width_in=PAGE_IN,
)
