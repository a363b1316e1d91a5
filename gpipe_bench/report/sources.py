"""Where the tables and figures of a report lie: in the folder of a run, or below a folder of reference results.

results/ablation.csv                          figures/ablation.svg                                a run
results/reference/published/rows.csv                                                              published values
results/reference/simulated/p40/ablation.csv  figures/reference/simulated-p40/ablation.svg        reference results
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.results.catalogue import COMPANION_SUFFIXES
from gpipe_bench.results.rows import EVIDENCE

_SHOWN: Final = ("_verdict",)
"""Companions that the page shows as tables of their own."""

_NEXT: Final = "run `snakemake --cores 1 ablation` first, or name results/reference for the committed results"


@dataclass(frozen=True, slots=True)
class Source:
    """Tables and figures that belong together.

    Attributes:
        evidence: of all reference results of this folder; empty for a run, whose rows say it one by one.
        hardware: name of the folder of reference results, such as ``p40``; empty for a run and for published values.
        tables: CSV files that are no companions.
        images: SVG files.
    """

    evidence: str
    hardware: str
    tables: Sequence[Path]
    images: Sequence[Path]

    @property
    def place(self) -> str:
        """What tells the source apart on the page; empty for a run."""
        return "-".join(filter(None, (self.evidence, self.hardware)))


def find_sources(results: Path, figures: Path | None = None) -> list[Source]:
    """The sources below a folder of results: published before simulated before measured.

    Args:
        results: the folder.
        figures: the folder of its figures; by default the one whose path has ``figures`` where this has ``results``.

    Raises:
        ConfigError: a folder does not exist, or there is no table.
    """
    check_folder("--results", results, _NEXT)
    if figures is not None:
        check_folder("--figures", figures)
    found = list(_sources(results, figures or _beside(results)))
    if not any(source.tables for source in found):
        raise ConfigError([f"--results must be a folder with tables (*.csv), got none in {results}; {_NEXT}"])
    return [source for source in found if source.tables or source.images]


def check_folder(option: str, folder: Path, remedy: str = "name one that exists, or leave the option out") -> None:
    """Refuse a folder that was named and is none.

    Raises:
        ConfigError: always then.
    """
    if not folder.is_dir():
        got = "a file" if folder.exists() else "no such folder"
        raise ConfigError([f"{option} must be a folder, got {folder} ({got}); {remedy}"])


def _beside(results: Path) -> Path:
    """``figures`` in place of the last ``results`` of a path; the folder itself where there is none."""
    parts = list(results.parts)
    if "results" not in parts:
        return results
    place = len(parts) - 1 - parts[::-1].index("results")
    return Path(*parts[:place], "figures", *parts[place + 1 :])


def _sources(results: Path, figures: Path) -> Iterator[Source]:
    yield Source("", "", _tables(results), sorted(figures.glob("*.svg")))
    for evidence in EVIDENCE:
        folder = results / evidence
        if tables := _tables(folder):
            yield Source(evidence, "", tables, sorted((figures / evidence).glob("*.svg")))
        for place in sorted(path for path in folder.glob("*") if path.is_dir()):
            images = sorted((figures / f"{evidence}-{place.name}").glob("*.svg"))
            yield Source(evidence, place.name, _tables(place), images)


def _tables(folder: Path) -> list[Path]:
    hidden = tuple(suffix for suffix in COMPANION_SUFFIXES if suffix not in _SHOWN)
    return [path for path in sorted(folder.glob("*.csv")) if not path.stem.endswith(hidden)]
