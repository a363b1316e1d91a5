"""Networks side by side under every schedule: throughput, memory of the fullest device, time that only copies take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gpipe_bench.figures.base import PAGE_IN, Figure, Panel, Rows, Selection, heading, legend, note
from gpipe_bench.figures.schedules import ScheduleCell, read_cells
from gpipe_bench.figures.style import OKABE_ITO, RULE
from gpipe_bench.figures.text import TIMES, times
from gpipe_bench.results.labels import training_words
from gpipe_bench.results.rows import Row
from gpipe_bench.schedules import SCHEDULES

_HEIGHT_IN: Final = 0.85
_READING: Final = (
    "Memory is that of the fullest device. Only copies: the share of the step in which a device does nothing but copy."
)
_LOOKS: Final[Sequence[dict[str, Any]]] = (
    {"marker": "o", "color": OKABE_ITO["black"], "markersize": 3.6},
    {"marker": "D", "color": OKABE_ITO["vermilion"], "markersize": 3.4},
    {"marker": "x", "color": OKABE_ITO["blue"], "markersize": 4.0},
    {"marker": "^", "color": OKABE_ITO["green"], "markersize": 4.2, "fillstyle": "none"},
    {"marker": "s", "color": OKABE_ITO["purple"], "markersize": 3.6, "fillstyle": "none"},
    {"marker": "v", "color": OKABE_ITO["sky"], "markersize": 4.2, "fillstyle": "none"},
)
_QUANTITIES: Final[Sequence[tuple[str, Callable[[ScheduleCell], float]]]] = (
    ("samples/s", lambda cell: cell.throughput),
    ("GiB reserved", lambda cell: cell.memory_gib),
    ("only copies (%)", lambda cell: 100 * (cell.row.copy_fraction or 0.0)),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Cells on the same devices.

    Attributes:
        title: which devices.
        cells: by the name of the network, then by schedule.
    """

    title: str
    cells: dict[str, dict[str, ScheduleCell]]


def settings_of(cells: Sequence[ScheduleCell]) -> list[Setting]:
    """Cells by their devices, by how they train if that differs, and by networks, in the order of the table."""
    rows = [cell.row for cell in cells]
    found: dict[str, dict[str, dict[str, ScheduleCell]]] = {}
    for cell in cells:
        row = cell.row
        hosts = f" on {row.hosts} hosts" if (row.hosts or 1) > 1 else ""
        words = [] if len(set(map(training_words, rows))) == 1 else (training_words(row) or "float32").split(", ")
        title = "\n".join([f"{cell.devices} {row.profile}{hosts}, m = {row.chunks}", *words])
        found.setdefault(title, {}).setdefault(_network(row, rows), {})[row.schedule] = cell
    return [Setting(title, own) for title, own in found.items()]


def _network(row: Row, rows: Sequence[Row]) -> str:
    """The model, and of its arguments and variants what not all of its rows have."""
    own = [other for other in rows if other.model == row.model]
    common = set(row.model_args.split(";"))
    differing = common.copy()
    for other in own:
        common &= set(other.model_args.split(";"))
    differing -= common
    variants = {other.variant for other in own}
    return ", ".join([row.model, *sorted(differing), *([row.variant] if len(variants) > 1 else [])])


def _panels(cells: Sequence[ScheduleCell], width_in: float) -> Rows:
    """A column of panels for each setting, a row for each quantity."""
    settings = settings_of(cells)
    names = list(dict.fromkeys(name for setting in settings for name in setting.cells))
    looks = dict(zip(names, _LOOKS, strict=False))
    trained = {training_words(cell.row) or "float32" for cell in cells}
    alike = trained if len(trained) == 1 else set[str]()
    shown: list[Sequence[Panel]] = []
    for label, value in _QUANTITIES:
        last = label == _QUANTITIES[-1][0]
        draw = _drawing(label, value, looks, first=not shown, last=last)
        shown.append([Panel(draw, setting, _HEIGHT_IN) for setting in settings])
    handles = [Line2D([], [], linestyle="none", label=name, **look) for name, look in looks.items()]
    whole = all(len({*map(frozenset, setting.cells.values())}) == 1 for setting in settings)
    missing = "" if whole else " A mark that is missing: the step does not fit."
    return [
        heading(_finding(settings[0]), [cells[0].row.evidence], ", ".join(alike), width_in),
        *shown,
        legend(handles, 2),
        note(_READING + missing, width_in),
    ]


def _finding(setting: Setting) -> str:
    """Throughput of the slowest network over that of the fastest, under the schedules that both have."""
    ranked = sorted(setting.cells, key=lambda name: median(cell.throughput for cell in setting.cells[name].values()))
    slow, fast = setting.cells[ranked[0]], setting.cells[ranked[-1]]
    ratios = [slow[name].throughput / fast[name].throughput for name in slow if name in fast]
    if slow is fast or not ratios:
        return "Networks under every schedule"
    ends = times(min(ratios)), times(max(ratios))
    by = ends[0] if ends[0] == ends[1] else f"{ends[0].removesuffix(TIMES)} to {ends[1]}"
    # One piece, so that no line of the title has only the end of it.
    where = setting.title.partition("\n")[0].replace(" ", "\u00a0")
    return f"{ranked[0]} trains {by} as fast as {ranked[-1]} ({where})"


def _drawing(
    label: str, value: Callable[[ScheduleCell], float], looks: dict[str, dict[str, Any]], *, first: bool, last: bool
) -> Callable[[Axes, Setting], None]:
    def draw(axes: Axes, setting: Setting) -> None:
        schedules = [name for name in SCHEDULES if any(name in own for own in setting.cells.values())]
        for name, own in setting.cells.items():
            points = [(x, value(own[schedule])) for x, schedule in enumerate(schedules) if schedule in own]
            axes.plot([x for x, _ in points], [y for _, y in points], linestyle="none", clip_on=False, **looks[name])
        axes.set_xticks(range(len(schedules)), schedules if last else [""] * len(schedules), rotation=90)
        axes.set(xlim=(-0.6, len(schedules) - 0.4), ylim=(0, None), ylabel=label)
        if first:
            axes.set_title(setting.title, fontsize="medium", pad=3)
        axes.grid(linewidth=0.3, color=RULE)
        axes.set_axisbelow(True)

    return draw


def _read(path: Path, selection: Selection) -> list[ScheduleCell]:
    return [cell for cell in read_cells(path, selection.evidence) if cell.row.backward == "scheduled"]


NETWORKS: Final = Figure(
    name="networks",
    caption=(
        "Throughput, memory of the fullest device, and share of the step in which only copies run, of several networks "
        "under every schedule. Columns are devices."
    ),
    sources=("", "_devices"),
    read=_read,
    panels=_panels,
    width_in=PAGE_IN,
)
