"""Schedules beside each other: throughput over the memory of the fullest device, and over numbers of devices.

Of the cells of one model on one type of device the Pareto front has those that no other cell beats in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gpipe_bench.figures.marks import Mark
from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.style import BOTH_IN, FAINT, FONT_PT, INK, OKABE_ITO, RULE
from gpipe_bench.figures.tables import read_rows
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
            Mark("X", OKABE_ITO["vermilion"], 4.6),
            Mark("p", OKABE_ITO["purple"], 4.6),
            Mark("h", OKABE_ITO["purple"], 4.6),
            Mark("*", OKABE_ITO["vermilion"], 5.6),
        ),
        strict=True,
    )
)
"""Shape and colour of each schedule."""

_FILLS: Final = {"never": "full", "except_last": "left", "always": "none"}
_FEWEST, _COLUMNS = 3, 5
_TICKS: Final = (0.2, 0.5, 1, 2, 5, 10, 20, 50)
_HEIGHT_IN: Final = 1.3
_TITLE_IN: Final = 0.16
_AXIS_IN: Final = 0.36
_LEFT_IN: Final = 0.36
_RIGHT_IN: Final = 0.06


@dataclass(frozen=True, slots=True)
class ScheduleCell:
    """A row that ended well.

    Attributes:
        row: that row.
        memory_gib: peak of what the allocator held on the fullest device.
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


def read_cells(rows_csv: Path) -> list[ScheduleCell]:
    """The rows of an experiment that ended well, with the memory of their devices from the table beside them.

    Raises:
        ConfigError: a table cannot be read, or lacks a column.
    """
    table = read_table(rows_csv.with_name(f"{rows_csv.stem}_devices.csv"), ("cell", "repeat", "peak_reserved_gib"))
    fullest = table.groupby(["cell", "repeat"])["peak_reserved_gib"].max().to_dict()
    rows = [row for row in read_rows(rows_csv) if row.status == "ok"]
    return [ScheduleCell(row, float(fullest.get((row.cell, row.repeat or 0), 0.0))) for row in rows]


def pareto(cells: Iterable[ScheduleCell]) -> list[ScheduleCell]:
    """The cells that no other one beats in throughput and memory, from small to large; of equal ones the first."""
    front: list[ScheduleCell] = []
    for cell in sorted(cells, key=lambda one: (one.memory_gib, -one.throughput)):
        if not front or cell.throughput > front[-1].throughput:
            front.append(cell)
    return front


def pareto_figure(cells: Sequence[ScheduleCell]) -> Figure:
    """Throughput over memory, a panel for each model and type of device, on the devices that most cells have."""
    groups = {
        name: [cell for cell in group if cell.devices == _usual(group)] for name, group in simulated(cells).items()
    }
    counts = sorted({_usual(group) for group in groups.values()})
    words = f"on {' or '.join(map(str, counts))} devices, in samples/s, over the peak memory of the fullest device"
    page = Page(BOTH_IN)
    page.heading(f"Throughput {words}", "simulated")
    panels(page, groups, _draw_pareto, "GiB reserved")
    legend(page)
    page.paragraph(
        "Line and large marks: the Pareto front. Small marks: cells that another one beats in both. "
        "Full: no checkpoints; half: except the last micro-batch; empty: always.",
        colour=FAINT,
    )
    return page.render()


def scaling_figure(cells: Sequence[ScheduleCell]) -> Figure:
    """Throughput over that of 1F1B, a panel for each model and type of device, over numbers of devices."""
    groups = {name: _alike(group) for name, group in simulated(cells).items()}
    page = Page(BOTH_IN)
    page.heading("Throughput over that of 1F1B, with more devices", "simulated")
    panels(page, {name: group for name, group in groups.items() if group}, _draw_scaling, "devices")
    legend(page)
    heads = [group[0].row for group in groups.values() if group]
    modes = " or ".join(dict.fromkeys(f"{row.chunks} micro-batches, checkpoint {row.checkpoint}" for row in heads))
    page.paragraph(f"{modes}. A gap: the schedule does not fit the memory.", colour=FAINT)
    return page.render()


def simulated(cells: Iterable[ScheduleCell]) -> dict[str, list[ScheduleCell]]:
    """The simulated cells by model and type of device."""
    found: dict[str, list[ScheduleCell]] = {}
    for cell in cells:
        if cell.row.evidence == "simulated":
            found.setdefault(f"{cell.row.model}, {cell.row.profile}", []).append(cell)
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


Draw = Callable[[Axes, Sequence[ScheduleCell]], None]


def panels(page: Page, groups: dict[str, list[ScheduleCell]], draw: Draw, label: str) -> None:
    """Add a panel for each group, five beside each other."""
    names = list(groups)
    for start in range(0, len(names), _COLUMNS):
        shown = names[start : start + _COLUMNS]

        page.space(0.05)
        row = {name: groups[name] for name in shown}
        page.strip(_TITLE_IN + _HEIGHT_IN + _AXIS_IN, partial(_draw_panels, groups=row, draw=draw, label=label))


def _draw_panels(frame: Frame, groups: dict[str, list[ScheduleCell]], draw: Draw, label: str) -> None:
    pitch = BOTH_IN / max(_FEWEST, len(groups))
    for k, (name, group) in enumerate(groups.items()):
        axes = frame.axes(k * pitch + _LEFT_IN, pitch - _LEFT_IN - _RIGHT_IN, _TITLE_IN, _HEIGHT_IN)
        axes.set_title(name, fontsize=FONT_PT, pad=3)
        axes.grid(linewidth=0.3, color=RULE)
        axes.set_axisbelow(True)
        axes.set_xlabel(label)
        draw(axes, group)


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


def legend(page: Page) -> None:
    """Add the marks of all schedules to a page."""
    handles = [Line2D([], [], label=name, **mark_style(name)) for name in SCHEDULES]
    page.space(0.04)
    page.strip(
        0.30,
        lambda frame: frame.legend(handles, 6, handletextpad=0.2, columnspacing=1.6, labelspacing=0.3, labelcolor=INK),
    )
