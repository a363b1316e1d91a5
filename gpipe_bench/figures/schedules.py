"""Schedules beside each other: throughput over the memory of the fullest device, and over numbers of devices.

Of the cells of one model on one type of device the Pareto front has those that no other cell beats in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.ablation import Mark
from gpipe_bench.figures.base import PAGE_IN, Figure, Panel, Rows, Selection, blank, heading, legend, note
from gpipe_bench.figures.style import FAINT, OKABE_ITO, RULE
from gpipe_bench.figures.tables import read_rows
from gpipe_bench.figures.text import listing
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
            Mark("<", "#7FD6D6", 4.4),
            Mark(">", "#17365C", 4.4),
            Mark("P", "#8FCB8F", 4.6),
            Mark("D", OKABE_ITO["green"], 3.8),
            Mark("d", "#00503C", 4.4),
            Mark("X", OKABE_ITO["vermilion"], 4.6),
            Mark("p", OKABE_ITO["purple"], 4.6),
            Mark("8", "#6A2C5B", 4.4),
            Mark("*", "#8C1C13", 5.6),
        ),
        strict=True,
    )
)
"""Shape and colour of each schedule."""


@dataclass(frozen=True, slots=True)
class Family:
    """Schedules that share an idea, of which the figure of scaling shows the best.

    Attributes:
        name: in the legend.
        members: names of the schedules.
        mark: that of one of them stands for all.
    """

    name: str
    members: Sequence[str]
    mark: str


_ZERO_BUBBLE: Final = Family("zero-bubble: zb_h1, zb_h2, zb_1p, zb_2p", ("zb_h1", "zb_h2", "zb_1p", "zb_2p"), "zb_h2")
_FAMILIES: Final = (
    Family("gpipe", ("gpipe",), "gpipe"),
    Family("1f1b", ("1f1b",), "1f1b"),
    _ZERO_BUBBLE,
    Family("loops: interleaved, interleaved_zb, looped_bfs", ("interleaved", "interleaved_zb", "looped_bfs"),
           "interleaved"),
    Family("V-shaped: zb_v, dualpipe_v", ("zb_v", "dualpipe_v"), "zb_v"),
    Family("V-shaped, less memory: v_half, v_min", ("v_half", "v_min"), "v_half"),
)  # fmt: skip
_FILLS: Final = {"never": "full", "except_last": "left", "always": "none"}
_COLUMNS: Final = 4
_TICKS: Final = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_NARROW_TICKS: Final = (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100)
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
    words = (
        "Memory: reserved by the fullest device. Line: the front. Its micro-batches (m) stand above a panel; they "
        "change at a dotted line. "
        "Full marks: no checkpoints; half: except the last micro-batch; empty: always."
    )
    on = f"On {' or '.join(map(str, counts))} devices"
    return [
        heading(_pareto_finding(groups, on), [cells[0].row.evidence], "", width_in),
        *_rows(groups, _draw_pareto, ("samples/s", "GiB, fullest device")),
        _marks(),
        note(words, width_in),
    ]


def _pareto_finding(groups: Mapping[str, Sequence[ScheduleCell]], on: str) -> str:
    """Which schedules are fastest, and in how many panels."""
    fastest = Counter(max(group, key=lambda cell: cell.throughput).row.schedule for group in groups.values())
    if len(fastest) == 1:
        return f"{on} {next(iter(fastest))} is the fastest schedule for the most memory, and slower ones need less"
    names = [f"{name} ({count})" if count > 1 else name for name, count in fastest.most_common()]
    return f"{on} no schedule is the fastest everywhere: {listing(names)} each lead some of {len(groups)} settings"


def _scaling_panels(cells: Sequence[ScheduleCell], width_in: float) -> Rows:
    """A panel for each model and type of device, over numbers of devices."""
    groups = {name: group for name, every in _groups(cells).items() if (group := _alike(every))}
    heads = [group[0].row for group in groups.values()]
    modes = [*dict.fromkeys(f"{row.chunks} micro-batches, checkpoint {row.checkpoint}" for row in heads)]
    if len(modes) > 1:
        # A panel says its own.
        modes = [f"checkpoint {listing([*dict.fromkeys(row.checkpoint for row in heads)])}"]
        groups = {
            name.replace(first := name.partition("\n")[0], f"{first}, m = {row.chunks}", 1): group
            for (name, group), row in zip(groups.items(), heads, strict=True)
        }
    handles = [
        Line2D([], [], label=one.name, linewidth=1.2, **{**mark_style(one.mark), "linestyle": "-"}) for one in _FAMILIES
    ]
    return [
        heading(_scaling_finding(groups), [cells[0].row.evidence], modes[0], width_in),
        *_rows(groups, _draw_scaling, ("throughput over 1f1b", "devices")),
        legend(handles, 2),
        note("A line is the fastest schedule of its family on so many devices. A gap: none fits the memory.", width_in),
    ]


def _scaling_finding(groups: Mapping[str, Sequence[ScheduleCell]]) -> str:
    """In how many panels zero-bubble schedules beat 1F1B on the most devices, and by how much."""
    ends = []
    for group in groups.values():
        ratios = _ratios(group, _ZERO_BUBBLE)
        ends += [ratios[max(ratios)]] if ratios else []
    gains = [ratio - 1 for ratio in ends if ratio > 1]
    if not gains:
        return "Throughput of other schedules over that of 1F1B, with more devices"
    least, most = (f"{100 * gain:.0f}" for gain in (min(gains), max(gains)))
    by = f"by {least}\u00a0%" if least == most else f"by {least} to {most}\u00a0%"
    panels = f"{len(gains)} of {len(groups)} settings" if len(groups) > 1 else next(iter(groups)).partition("\n")[0]
    return f"On the most devices zero-bubble schedules beat 1F1B {by} in {panels}"


def _ratios(cells: Iterable[ScheduleCell], family: Family) -> dict[int, float]:
    """Throughput of the fastest schedule of a family over that of 1F1B, by devices on which both are known."""
    base, best = {}, dict[int, float]()
    for cell in cells:
        if cell.row.schedule == "1f1b":
            base[cell.devices] = cell.throughput
        if cell.row.schedule in family.members:
            best[cell.devices] = max(best.get(cell.devices, 0.0), cell.throughput)
    return {p: best[p] / base[p] for p in sorted(base) if p in best}


def beats_from(cells: Iterable[ScheduleCell], family: Family = _ZERO_BUBBLE) -> int | None:
    """The devices from which on a family is always faster than 1F1B; None if it is not on the most devices."""
    ratios = _ratios(cells, family)
    found = None
    for p in sorted(ratios, reverse=True):
        if ratios[p] <= 1:
            break
        found = p
    return found


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
    groups: Mapping[str, Sequence[ScheduleCell]],
    draw: Callable[[Axes, Sequence[ScheduleCell]], str],
    labels: tuple[str, str],
) -> Rows:
    """A panel for each group, four beside each other, with what ``draw`` says of it in its title."""

    def drawn(axes: Axes, named: tuple[str, Sequence[ScheduleCell]], *, first: bool) -> None:
        axes.grid(linewidth=0.3, color=RULE)
        axes.set_axisbelow(True)
        axes.set(ylabel=labels[0] if first else "", xlabel=labels[1])
        words = draw(axes, named[1])
        axes.set_title(f"{named[0]}\n{words}" if words else named[0], fontsize="medium", pad=3)

    panels = [
        Panel(partial(drawn, first=k % _COLUMNS == 0), named, _HEIGHT_IN) for k, named in enumerate(groups.items())
    ]
    # A panel that is alone in the last row must not become wider than those above it.
    panels += [blank(_HEIGHT_IN)] * (-len(panels) % _COLUMNS) if len(panels) > _COLUMNS else []
    return [panels[start : start + _COLUMNS] for start in range(0, len(panels), _COLUMNS)]


def _draw_pareto(axes: Axes, cells: Sequence[ScheduleCell]) -> str:
    """Every cell, and a line through the front; the micro-batches of the front, from left to right."""
    front = pareto(cells)
    axes.step([cell.memory_gib for cell in front], [cell.throughput for cell in front], where="post", color=FAINT)
    for cell in [*cells, *front]:
        style = mark_style(cell.row.schedule, _FILLS[cell.row.checkpoint])
        if cell not in front:
            style |= {"markersize": 2.2, "markeredgewidth": 0.4}
        axes.plot(cell.memory_gib, cell.throughput, **style, clip_on=False, zorder=3)
    axes.set_xscale("log")
    low, high = (pick(cell.memory_gib for cell in cells) for pick in (min, max))
    within = [[tick for tick in some if low <= tick <= high] for some in (_TICKS, _NARROW_TICKS)]
    ticks = within[0] if len(within[0]) > 1 else within[1]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    counts = [cell.row.chunks for cell in front]
    for before, after in pairwise(front):
        if before.row.chunks != after.row.chunks:
            axes.axvline((before.memory_gib * after.memory_gib) ** 0.5, color=FAINT, linewidth=0.8, linestyle=":")
    return f"m = {' | '.join(str(m) for m, _ in groupby(counts))}"


def _draw_scaling(axes: Axes, cells: Sequence[ScheduleCell]) -> str:
    """A line for each family; from how many devices on zero-bubble schedules beat 1F1B."""
    counts = sorted(_ratios(cells, Family("", ("1f1b",), "1f1b")))
    for family in _FAMILIES:
        known = _ratios(cells, family)
        ratios = [known.get(p, float("nan")) for p in counts]
        style = {**mark_style(family.mark), "linestyle": "-"}
        axes.plot(range(len(counts)), ratios, **style, linewidth=1.2, clip_on=False)
    axes.set_xticks(range(len(counts)), [str(p) for p in counts])
    start = beats_from(cells)
    return f"zero-bubble ahead from {start} on" if start else "zero-bubble not ahead"


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
        "front, with its micro-batches (m) above the panel. Small marks: cells that another one beats in both."
    ),
    sources=("", "_devices"),
    read=_read,
    panels=_pareto_panels,
    width_in=PAGE_IN,
)
SCALING: Final = Figure(
    name="schedules_scaling",
    caption=(
        "Throughput of the fastest schedule of each family over that of 1F1B, over the number of devices. A gap: none "
        "of the family fits the memory."
    ),
    sources=("", "_devices"),
    read=_read,
    panels=_scaling_panels,
    width_in=PAGE_IN,
)
