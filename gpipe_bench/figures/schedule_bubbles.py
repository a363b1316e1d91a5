"""The idle time of schedules: by arithmetic, simulated, emulated and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gpipe_bench.figures.base import PAGE_IN, Figure, Panel, Rows, Selection, heading, legend, note
from gpipe_bench.figures.schedules import read_cells
from gpipe_bench.figures.style import EVIDENCE_COLOURS, RULE
from gpipe_bench.figures.text import percent
from gpipe_bench.results.labels import training_words
from gpipe_bench.results.rows import Row
from gpipe_bench.schedules import SCHEDULES, Schedule, named_schedule, timing, with_recomputation
from gpipe_bench.schedules.cycles import checkpoint_stop
from gpipe_bench.schedules.table import device_count

_HEIGHT_IN: Final = 1.5
_PANELS: Final = 3
_ARITHMETIC: Final = "formula"
_LOOK: Final[Mapping[str, dict[str, Any]]] = {
    _ARITHMETIC: {"marker": "_", "color": "#222222", "markersize": 8, "markeredgewidth": 1.2},
    "simulated": {"marker": "o", "color": EVIDENCE_COLOURS["simulated"], "markersize": 4, "fillstyle": "none"},
    "emulated": {"marker": "x", "color": EVIDENCE_COLOURS["emulated"], "markersize": 4},
    "measured, threads": {"marker": "s", "color": EVIDENCE_COLOURS["measured"], "markersize": 3.2},
    "measured, processes": {"marker": "^", "color": EVIDENCE_COLOURS["measured"], "markersize": 4, "fillstyle": "none"},
}


@dataclass(slots=True)
class IdlePanel:
    """Cells that differ in their schedule and evidence alone.

    Attributes:
        title: model, device and sizes.
        idle: by evidence, then by schedule, the idle share of all devices.
    """

    title: str
    idle: dict[str, dict[str, float]]


def _read(path: Path, selection: Selection) -> list[Row]:
    """The rows of one kind of evidence, and simulated ones beside them, from the table or that of the same hardware."""
    rows = [cell.row for cell in read_cells(path, selection.evidence)]
    if selection.evidence == "emulated":
        folder = path.resolve().parent
        other = folder.parent.parent / "simulated" / folder.name / path.name
        table = [cell.row for cell in read_cells(path)]
        twins = [row for row in table if row.evidence == "simulated"]
        rows += twins or ([cell.row for cell in read_cells(other)] if other.is_file() else [])
    return rows


def _panels(rows: Sequence[Row], width_in: float) -> Rows:
    """A panel for each setting."""
    shown = settings_of(rows)[:_PANELS]
    kinds = [kind for kind in _LOOK if any(kind in setting.idle for setting in shown)]
    evidence = [kind for kind in EVIDENCE_COLOURS if any(name.startswith(kind) for name in kinds)]
    handles: list[Any] = [Line2D([], [], linestyle="none", label=kind, **_LOOK[kind]) for kind in kinds]
    words = (
        "Steps overlap, but the formula is of one alone. "
        if _overlap(rows)
        else "Steps do not overlap: each ends on all devices, as in the formula. "
    )
    words += "Formula: T_F = T_B = T_W, equal partitions, free transfers. Idle: neither computation nor recomputation."
    return [
        heading(_finding(shown), [*evidence, "computed"], "", width_in),
        [Panel(_draw_idle, setting, _HEIGHT_IN) for setting in shown],
        legend(handles, len(handles)),
        note(words, width_in),
    ]


def _finding(shown: Sequence[IdlePanel]) -> str:
    """The schedules that idle most and least, and how far the formula is from them."""
    idle = {kind: own for kind, own in shown[0].idle.items() if kind != _ARITHMETIC}
    kind = next(iter(idle))
    own, formula = idle[kind], shown[0].idle[_ARITHMETIC]
    most, least = (pick(own, key=lambda name: own[name]) for pick in (max, min))
    above = [own[name] - formula[name] for name in own]
    where = shown[0].title.partition("\n")[0]
    words = f"{where}, {kind}: devices idle {percent(own[most])} of the time with {most}, {percent(own[least])} with "
    ends = [f"{100 * end:.0f}".replace("-", "\N{MINUS SIGN}") for end in (min(above), max(above))]
    return f"{words}{least}; {ends[0]} to {ends[1]} points above the formula"


def settings_of(rows: Sequence[Row]) -> list[IdlePanel]:
    """The settings of some rows: of emulated cells, then of measured ones; of simulated ones if there are no others."""
    # The formula is of one step between idle devices, as measured steps are; older tables do not have others like it.
    if not _overlap(rows):
        rows = [row for row in rows if row.evidence == "measured" or row.steps_overlap is False]
    found: dict[tuple[Any, ...], dict[str, dict[str, list[Row]]]] = {}
    alone = all(row.evidence == "simulated" for row in rows)
    for evidence in ("emulated", "measured", "simulated"):
        for row in (row for row in rows if row.evidence == evidence):
            words = training_words(replace(row, steps_overlap=None))
            key = (row.model, row.profile, row.chunks, row.checkpoint, words, row.batch_size, _devices(row))
            if evidence != "simulated" or key in found or alone:
                found.setdefault(key, {}).setdefault(_kind(row), {}).setdefault(row.schedule, []).append(row)
    panels = []
    for (model, machine, chunks, checkpoint, words, _, devices), kinds in found.items():
        idle = {kind: {name: median(map(_idle, some)) for name, some in own.items()} for kind, own in kinds.items()}
        heads = {name: some[0] for own in kinds.values() for name, some in own.items()}
        idle[_ARITHMETIC] = {name: timing(_schedule(row)).bubble for name, row in heads.items()}
        where = ", ".join(filter(None, (model, machine, words)))
        panels.append(IdlePanel(f"{where}\n{devices} devices, m = {chunks}, {checkpoint}", idle))
    return panels


def _overlap(rows: Sequence[Row]) -> bool:
    """Whether steps that are not measured overlap, all of them."""
    virtual = [row for row in rows if row.evidence != "measured"]
    return bool(virtual) and all(row.steps_overlap is not False for row in virtual)


def _kind(row: Row) -> str:
    if row.evidence != "measured":
        return row.evidence
    return f"measured, {'processes' if (row.processes or 1) > 1 else 'threads'}"


def _devices(row: Row) -> int:
    return device_count(row.schedule, row.partitions or 1)


def _schedule(row: Row) -> Schedule:
    """The actions of a row, with its recomputations."""
    m, n = row.microbatches or row.chunks or 1, row.partitions or 1
    schedule = named_schedule(row.schedule, m, n, device_count(row.schedule, n))
    return with_recomputation(schedule, checkpoint_stop(row.checkpoint, m))


def _idle(row: Row) -> float:
    return sum(filter(None, (row.bubble_fraction, row.imbalance_fraction, row.copy_fraction)))


def _draw_idle(axes: Axes, panel: IdlePanel) -> None:
    names = [name for name in SCHEDULES if name in panel.idle[_ARITHMETIC]]
    for kind, look in _LOOK.items():
        own = panel.idle.get(kind, {})
        points = [(x, 100 * own[name]) for x, name in enumerate(names) if name in own]
        axes.plot([x for x, _ in points], [y for _, y in points], linestyle="none", **look)
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(0, None), ylabel="idle (%)")
    axes.set_title(panel.title, fontsize="medium", pad=3)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(axis="y", linewidth=0.3, color=RULE)
    axes.set_axisbelow(True)


BUBBLES: Final = Figure(
    name="schedules_bubbles",
    caption=(
        "Share of the devices' time in which no computation and no recomputation runs, of every schedule, beside what "
        "we compute by the formula of each schedule. "
        "Compared are steps that do not overlap, each of which ends on all devices, unless the table has none."
    ),
    sources=("", "_devices"),
    read=_read,
    panels=_panels,
    width_in=PAGE_IN,
)
