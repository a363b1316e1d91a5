"""Which figures belong to the committed reference tables, by the names of the files alone.

    results/reference/simulated/p40/ablation.csv  ->  figures/reference/simulated-p40/ablation, ablation_shares, ...

The evidence stands in the path, so that no file of a simulated number goes without that word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REFERENCE: Final = Path("results/reference")
PUBLISHED_ROWS: Final = REFERENCE / "published" / "rows.csv"
"""The published values as rows."""

SUFFIXES: Final = ("svg", "pdf", "png")
COMPANION_SUFFIXES: Final = ("_devices", "_steps", "_events", "_layers", "_verdict", "_ratios", "_configurations")
"""Ends of the names of tables that lie beside a table of rows."""

_EVIDENCE: Final = ("simulated", "emulated", "measured")


@dataclass(frozen=True, slots=True)
class ReferenceFigure:
    """One figure.

    Attributes:
        kind: how it is drawn: the command of ``python -m gpipe_bench figure``.
        table: its rows.
        place: folder of its files below the folder of all figures, such as ``simulated-p40``.
        name: of the files, without suffix.
    """

    kind: str
    table: Path
    place: str
    name: str

    def paths(self, out: Path) -> list[Path]:
        """The files below ``out``."""
        return [out / self.place / f"{self.name}.{suffix}" for suffix in SUFFIXES]


def reference_tables(folder: Path = REFERENCE) -> list[Path]:
    """The simulated, emulated and measured tables of rows, companions left out."""
    tables = sorted(path for evidence in _EVIDENCE for path in folder.glob(f"{evidence}/*/*.csv"))
    return [path for path in tables if not path.stem.endswith(COMPANION_SUFFIXES) and path.stem != "predictions"]


def reference_companions(name: str, folder: Path = REFERENCE) -> list[Path]:
    """The simulated, emulated and measured tables of one name that :func:`reference_tables` leaves out."""
    return sorted(path for evidence in _EVIDENCE for path in folder.glob(f"{evidence}/*/{name}.csv"))


def reference_figures(folder: Path = REFERENCE) -> list[ReferenceFigure]:
    """The figures of all reference tables but those of studies, sorted.

    Emulated cells of a sweep have none: they are too few for a map.
    """
    figures = [figure for table in reference_tables(folder) for figure in _figures(table)]
    return [one for one in figures if not (one.kind in ("sweep", "why") and one.place.startswith("emulated"))]


def _figures(table: Path) -> Iterator[ReferenceFigure]:
    place = f"{table.parent.parent.name}-{table.parent.name}"
    if table.stem == "ablation":
        yield from _ablation_figures(table, place)
    elif table.stem in ("speed", "memory"):
        yield ReferenceFigure("tables", table, place, table.stem)
    elif table.stem.startswith("sweep_"):
        yield ReferenceFigure("sweep", table, place, table.stem)
        yield ReferenceFigure("why", table, place, table.stem.replace("sweep_", "why_", 1))
    elif table.stem.startswith("schedules"):
        yield from _schedule_figures(table, place)
    elif table.stem.startswith("advice"):
        yield ReferenceFigure("advice", table, place, table.stem)


def _ablation_figures(table: Path, place: str) -> Iterator[ReferenceFigure]:
    yield ReferenceFigure("ablation", table, place, "ablation")
    if not place.startswith("measured"):
        yield ReferenceFigure("shares", table, place, "ablation_shares")
        if table.with_name("ablation_events.csv").is_file():
            yield ReferenceFigure("timelines", table, place, "ablation_timelines")


def _schedule_figures(table: Path, place: str) -> Iterator[ReferenceFigure]:
    parts = ("pareto", "scaling") if place.startswith("simulated") else ("bubbles",)
    for part in ("timelines",) if table.stem == "schedules_timelines" else parts:
        yield ReferenceFigure("schedules", table, place, f"schedules_{part}")
