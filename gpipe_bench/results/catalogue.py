"""Which figures belong to the committed reference tables, by the names of the files alone.

    results/reference/simulated/p40/ablation.csv  ->  figures/reference/simulated-p40/ablation, ablation_shares, ...

The evidence stands in the path, so that no file of a simulated number goes without that word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gpipe_bench.data import REFERENCE_FOLDER

PUBLISHED_ROWS: Final = Path("results/reference/published/rows.csv")
"""The published values as rows."""

SUFFIXES: Final = ("svg", "pdf", "png")
COMPANION_SUFFIXES: Final = ("_devices", "_steps", "_events", "_layers", "_verdict", "_ratios", "_configurations")
"""Ends of the names of tables that lie beside a table of rows."""

_EVIDENCE: Final = ("simulated", "emulated", "measured")
_KINDS: Final = {
    "speed": "tables",
    "memory": "tables",
    "sweep": "sweep",
    "advice": "advice",
    "residuals": "networks",
    "schedules_timelines": "schedules_timelines",
    "judge": "verdicts",
}
"""The figure of a table by the beginning of its name."""

_FACTORIAL: Final = {"ablation": "", "shares": "_shares"}
"""The figures of a factorial without timelines, with the ends of their names."""

_SCHEDULES: Final = {
    "simulated": ("schedules_pareto", "schedules_scaling"),
    "emulated": ("schedules_bubbles",),
    "measured": ("schedules_bubbles",),
}
"""The figures of the comparison of schedules by the evidence."""


@dataclass(frozen=True, slots=True)
class DrawnFigure:
    """One figure of one table.

    Attributes:
        kind: its name in ``gpipe-bench figure``.
        table: its rows.
        name: of the files, without suffix.
        evidence: the kind that it is of.
        place: folder of its files below the folder of all figures, such as ``simulated-p40``; empty for a run.
    """

    kind: str
    table: Path
    name: str
    evidence: str
    place: str = ""

    def paths(self, out: Path) -> list[Path]:
        """The files below ``out``."""
        return [out / self.place / f"{self.name}.{suffix}" for suffix in SUFFIXES]


def reference_tables(folder: Path = REFERENCE_FOLDER) -> list[Path]:
    """The simulated, emulated and measured tables of rows, companions left out."""
    tables = sorted(path for evidence in _EVIDENCE for path in folder.glob(f"{evidence}/*/*.csv"))
    return [path for path in tables if not path.stem.endswith(COMPANION_SUFFIXES) and path.stem != "predictions"]


def reference_companions(name: str, folder: Path = REFERENCE_FOLDER) -> list[Path]:
    """The simulated, emulated and measured tables of one name that :func:`reference_tables` leaves out."""
    return sorted(path for evidence in _EVIDENCE for path in folder.glob(f"{evidence}/*/{name}.csv"))


def reference_figures(folder: Path = REFERENCE_FOLDER) -> list[DrawnFigure]:
    """The figures of all reference tables but those of studies, sorted, and that of printed values.

    Of the sweeps those that are simulated: the cells that are emulated or measured are too few for a map.
    """
    found = []
    for table in reference_tables(folder):
        evidence, place = table.parent.parent.name, f"{table.parent.parent.name}-{table.parent.name}"
        own = figures_of(table, evidence, published=evidence != "measured")
        found += [
            replace(one, place=place) for one in own if one.kind not in ("sweep", "why") or evidence == "simulated"
        ]
    printed = folder / PUBLISHED_ROWS.parent.name / "published.csv"
    arithmetic = DrawnFigure("zero_bubble", printed, "zero_bubble", "published", "published")
    return [*found, arithmetic] if printed.is_file() else found


def figures_of(table: Path, evidence: str, *, published: bool = True) -> list[DrawnFigure]:
    """The figures of a table's rows of one kind of evidence. Their names begin like that of the table.

    Args:
        table: its path.
        evidence: the kind.
        published: whether an ablation has published variants of this kind, which alone have shares and timelines.
    """
    name = table.stem
    if name == "ablation":
        more = ("shares", "timelines") if published else ()
        return [
            DrawnFigure(name, table, name, evidence),
            *(DrawnFigure(kind, table, f"{name}_{kind}", evidence) for kind in more),
        ]
    if name == "residuals_components":
        return [DrawnFigure(kind, table, f"{name}{end}", evidence) for kind, end in _FACTORIAL.items()]
    if name == "schedules":
        return [DrawnFigure(kind, table, kind, evidence) for kind in _SCHEDULES.get(evidence, ())]
    kind = next((kind for start, kind in _KINDS.items() if name == start or name.startswith(f"{start}_")), "")
    found = [DrawnFigure(kind, table, name, evidence)] if kind else []
    return [*found, DrawnFigure("why", table, name.replace("sweep", "why", 1), evidence)] if kind == "sweep" else found


def run_name(name: str, evidence: str) -> str:
    """The name of the files of a figure in a run: it ends with the evidence."""
    return name if name.endswith(f"_{evidence}") else f"{name}_{evidence}"


def run_figures(tables: Mapping[str, Sequence[str]], published: Sequence[str]) -> dict[str, DrawnFigure]:
    """The figures of a run by the names of their files, which end with the evidence.

    Args:
        tables: the kinds of evidence that each table of the run has, by its name.
        published: the kinds of evidence of which the ablation has published variants.
    """
    drawn = {}
    for name, kinds in tables.items():
        for kind in kinds:
            for one in figures_of(Path("results") / f"{name}.csv", kind, published=kind in published):
                found = replace(one, name=run_name(one.name, kind))
                drawn[found.name] = found
    return drawn
