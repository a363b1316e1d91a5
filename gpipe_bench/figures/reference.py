"""All figures of the reference tables, drawn by one command.

Simulated tables hold no published rows; those of the same settings are put beside them here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.ablation import ablation_figure
from gpipe_bench.figures.advice import advice_figure
from gpipe_bench.figures.published_tables import printed_metric, published_tables_figure
from gpipe_bench.figures.schedule_parts import draw_schedules
from gpipe_bench.figures.shares import shares_figure
from gpipe_bench.figures.style import draw
from gpipe_bench.figures.sweep import sweep_figure
from gpipe_bench.figures.tables import read_rows
from gpipe_bench.figures.timelines import draw_timelines
from gpipe_bench.figures.why import why_figure
from gpipe_bench.results.catalogue import PUBLISHED_ROWS, REFERENCE, ReferenceFigure, reference_figures
from gpipe_bench.results.outcomes import printed_beside
from gpipe_bench.results.rows import Row
from gpipe_bench.util.processes import spread

_FIGURES: Final[Mapping[str, Callable[[Sequence[Row]], Figure]]] = {
    "ablation": ablation_figure,
    "shares": shares_figure,
    "tables": lambda rows: published_tables_figure(rows, printed_metric(rows)),
    "sweep": sweep_figure,
    "why": why_figure,
    "advice": advice_figure,
}


def draw_reference(out: Path, folder: Path = REFERENCE, processes: int = 1) -> Iterator[list[Path]]:
    """Draw the figures, several at once where there are processes for them.

    Args:
        out: folder of the figures.
        folder: of the reference tables.
        processes: how many draw at once; see :func:`gpipe_bench.util.processes.spread`.

    Yields:
        The paths of each figure as it is done.

    Raises:
        ConfigError: there is no table, or one cannot be read.
        OutputError: a figure cannot be written.
    """
    figures = reference_figures(folder)
    if not figures:
        raise ConfigError([f"reference must hold tables of rows, got none below {folder}; restore the folder"])
    published = read_rows(folder / PUBLISHED_ROWS.relative_to(REFERENCE))
    yield from spread(lambda figure: _draw(figure, out / figure.place / figure.name, published), figures, processes)


def with_published(rows: Sequence[Row], published: Sequence[Row]) -> list[Row]:
    """Simulated and emulated rows with the published ones of the same settings before them; others as they are."""
    return [*printed_beside((row for row in rows if row.evidence in ("simulated", "emulated")), published), *rows]


def _draw(figure: ReferenceFigure, stem: Path, published: Sequence[Row]) -> list[Path]:
    if figure.kind == "timelines":
        events, (head, *_) = figure.table.with_name(f"{figure.table.stem}_events.csv"), read_rows(figure.table)
        return draw_timelines(events, figure.table, stem, head.evidence)
    if figure.kind == "schedules":
        beside = figure.table.parents[2] / "simulated" / figure.table.parent.name / figure.table.name
        return draw_schedules(figure.table, stem, figure.name.rpartition("_")[2], beside)
    rows = read_rows(figure.table)
    if figure.kind in ("ablation", "shares", "tables"):
        rows = _with_twins(rows, figure.table)
    if figure.kind in ("ablation", "shares", "tables"):
        rows = with_published(rows, [replace(row, experiment=rows[0].experiment) for row in published])
    return draw(_FIGURES[figure.kind], rows, stem)


def _with_twins(rows: Sequence[Row], table: Path) -> list[Row]:
    """Emulated rows with the simulated ones of the same table before them; simulated rows of one flavour.

    Where a table has two flavours, that of today's autograd engine belongs to the emulated rows.
    """
    if rows[0].evidence != "emulated":
        two = len({row.flavour for row in rows}) > 1
        return [row for row in rows if not (two and row.flavour == "current")]
    beside = table.parents[2] / "simulated" / table.parent.name / table.name
    twins = read_rows(beside) if beside.exists() else []
    two = len({row.flavour for row in twins}) > 1
    return [*(row for row in twins if not (two and row.flavour == "published")), *rows]
