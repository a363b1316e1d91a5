"""The idle time of schedules: by arithmetic, simulated, emulated and measured; and what overlap is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gpipe_bench.figures.base import PAGE_IN, Figure, Panel, Rows, Selection, heading, legend, note
from gpipe_bench.figures.schedules import MARKS, read_cells
from gpipe_bench.figures.style import EVIDENCE_COLOURS, RULE
from gpipe_bench.results.labels import training_words
from gpipe_bench.results.rows import Row
from gpipe_bench.schedules import SCHEDULES, Schedule, named_schedule, timing, with_recomputation
from gpipe_bench.schedules.cycles import checkpoint_stop
from gpipe_bench.schedules.table import device_count

_HEIGHT_IN: Final = 1.5
_PANELS: Final = 4
_ARITHMETIC: Final = "formula"
_LOOK: Final[Mapping[str, dict[str, Any]]] = {
    _ARITHMETIC: {"marker": "_", "color": "#222222", "markersize": 8, "markeredgewidth": 1.2},
    "simulated": {"marker": "o", "color": EVIDENCE_COLOURS["simulated"], "markersize": 4, "fillstyle": "none"},
    "emulated": {"marker": "x", "color": EVIDENCE_COLOURS["emulated"], "markersize": 4},
    "measured, threads": {"marker": "s", "color": EVIDENCE_COLOURS["measured"], "markersize": 3.2},
    "measured, processes": {"marker": "^", "color": EVIDENCE_COLOURS["measured"], "markersize": 4, "fillstyle": "none"},
}
_OVERLAP: Final = (8, 16)
"""Devices and micro-batches of the panel of overlap."""

_FACTORS: Final = tuple(1 - k / 20 for k in range(11))


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
    """A panel for each setting, and one of overlap beside what is not measured."""
    shown = settings_of(rows)[: _PANELS - 1]
    kinds = [kind for kind in _LOOK if any(kind in setting.idle for setting in shown)]
    evidence = [kind for kind in EVIDENCE_COLOURS if any(name.startswith(kind) for name in kinds)]
    handles: list[Any] = [Line2D([], [], linestyle="none", label=kind, **_LOOK[kind]) for kind in kinds]
    p, m = _OVERLAP
    words = (
        "Steps overlap, but the formula is of one alone. "
        if _overlap(rows)
        else "Steps do not overlap: each ends on all devices, as in the formula. "
    )
    words += "Formula: T_F = T_B = T_W, equal partitions, free transfers."
    panels = [Panel(_draw_idle, setting, _HEIGHT_IN) for setting in shown]
    if "measured" not in evidence:
        panels.append(Panel(_draw_overlap, None, _HEIGHT_IN))
        words += (
            f" Right: step of dualpipe_v by the formula, {m} micro-batches on {p} devices, if the two parts of a pair "
            "take less than one after the other."
        )
    return [
        heading("Idle share of all devices", evidence, "", width_in),
        panels,
        legend(handles, len(handles)),
        note(words, width_in),
    ]


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
    for (model, profile, chunks, checkpoint, words, _, devices), kinds in found.items():
        idle = {kind: {name: median(map(_idle, some)) for name, some in own.items()} for kind, own in kinds.items()}
        heads = {name: some[0] for own in kinds.values() for name, some in own.items()}
        idle[_ARITHMETIC] = {name: timing(_schedule(row)).bubble for name, row in heads.items()}
        machine = profile if "simulated" in kinds or "emulated" in kinds else "here"
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


def _draw_overlap(axes: Axes, _: None) -> None:
    p, m = _OVERLAP
    makespans = [timing(named_schedule("dualpipe_v", m, 2 * p, p), overlap=factor).makespan for factor in _FACTORS]
    saved = [100 * (1 - factor) for factor in _FACTORS]
    axes.plot(saved, makespans, "-", color=MARKS["dualpipe_v"].colour, label="dualpipe_v")
    for name, line in (("interleaved", "--"), ("zb_v", ":")):
        makespan = timing(named_schedule(name, m, 2 * p, p)).makespan
        axes.axhline(makespan, linestyle=line, color=MARKS[name].colour, label=name)
    axes.set(xlim=(0, 50), ylim=(0, None), xlabel="saved by overlap (%)", ylabel="step (T_F of a half)")
    axes.legend(loc="lower left", handlelength=1.6, borderpad=0.1)
    axes.set_title(f"worth of overlap, formula\n{p} devices, m = {m}", fontsize="medium", pad=3)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(axis="y", linewidth=0.3, color=RULE)
    axes.set_axisbelow(True)


BUBBLES: Final = Figure(
    name="schedules_bubbles",
    caption=(
        "Share of the devices' time in which no computation and no recomputation runs, of every schedule, beside what "
        "the formula of each schedule gives; and what it is worth if DualPipeV overlaps the two parts of a pair. "
        "Compared are steps that do not overlap, each of which ends on all devices, unless the table has none."
    ),
    sources=("", "_devices"),
    read=_read,
    panels=_panels,
    width_in=PAGE_IN,
)
