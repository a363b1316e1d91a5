"""``cite``: what a paper needs to say of a table of results, so that a reader finds the same file again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gpipe_bench import __version__
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.catalogue import COMPANION_SUFFIXES
from gpipe_bench.results.schema import table_of
from gpipe_bench.results.tables import DESCRIPTOR, read_text, recorded_digests

if TYPE_CHECKING:
    import pandas as pd

TITLE: Final = "gpipe_bench: a reproducible benchmark suite for pipeline-parallel training"
AUTHOR: Final = "The gpipe_bench authors"
YEAR: Final = 2026
URL: Final = "https://github.com/gpipe-bench/gpipe_bench"
"""As CITATION.cff says, which an installed package does not have."""

RELEASES: Final = "releases.txt"
"""In the reference folder: of each version, the sha256 of its list of tables."""

_ESCAPED: Final = str.maketrans({letter: f"\\{letter}" for letter in "_%&#$"})
_SHOWN_SOURCES: Final = 8


def cite(table: Annotated[Path, typer.Argument(help="CSV file of results.")]) -> None:
    """Print a BibTeX entry for a table: release or none, commits, sha256 and the kinds of evidence of its rows."""
    text = read_text(table)
    kind = table_of(list(text.columns), table)
    digest = hashlib.sha256(table.read_bytes()).hexdigest()
    released = _released(table, digest)
    path = REFERENCE_FOLDER / released if released else table
    rows = _rows_beside(text, path)
    evidence = _counted(rows, "evidence")
    commits = _counted(rows, "commit")
    if not evidence:
        raise ConfigError([f"table must say its evidence, got {kind.name} in {table}; cite the table of rows"])
    place = f"results/reference/{released}" if released else table.name
    said = [f"evidence: {', '.join(evidence)}", f"commit: {', '.join(commits) or 'not recorded'}", f"sha256: {digest}"]
    software = {"version": __version__} if released else {"howpublished": f"Software, version {__version__}"}
    fields = {
        "title": f"{{{TITLE.translate(_ESCAPED)}}}",
        "author": f"{{{AUTHOR.translate(_ESCAPED)}}}",
        "year": str(YEAR),
        **software,
        "url": URL,
        "note": f"Table {place}{'' if released else ', of no release'}; {'; '.join(said)}".translate(_ESCAPED),
    }
    typer.echo(f"@misc{{gpipe_bench_{path.stem}_{digest[:8]},")
    for name, value in fields.items():
        typer.echo(f"  {name:<7} = {{{value}}},")
    typer.echo("}\n")
    of_kind = "" if kind.name == "rows" else f" of the kind {kind.name}"
    typer.echo(f"table     {place}, {len(text)} rows{of_kind}")
    if released:
        typer.echo(f"release   {__version__}")
    else:
        typer.echo(f"release   no table that {RELEASES} and {DESCRIPTOR} record for release {__version__}")
    for name, count in commits.items():
        typer.echo(f"commit    {name}, {count} rows")
    if not commits:
        typer.echo("commit    not recorded in these rows")
    if dirty := _counted(rows, "dirty").get("True", 0):
        typer.echo(f"          {dirty} rows with uncommitted changes: the commit alone does not give them again")
    typer.echo(f"sha256    {digest}")
    for name, count in evidence.items():
        typer.echo(f"evidence  {name}, {count} rows")
    sources = [*_counted(rows, "source")]
    for source in sources[:_SHOWN_SOURCES]:
        typer.echo(f"source    {source}")
    if len(sources) > _SHOWN_SOURCES:
        typer.echo(f"          and {len(sources) - _SHOWN_SOURCES} more in the column source")
    if "published" in evidence:
        typer.echo("Published values are those of their sources: cite these, too.")


def _rows_beside(text: pd.DataFrame, table: Path) -> pd.DataFrame:
    """The rows that say where a table is from: its own, or those that it is a companion of."""
    if "evidence" in text and "commit" in text:
        return text
    for suffix in COMPANION_SUFFIXES:
        beside = table.with_name(f"{table.stem.removesuffix(suffix)}{table.suffix}")
        if table.stem.endswith(suffix) and beside.is_file():
            return read_text(beside)
    return text


def _counted(rows: pd.DataFrame, column: str) -> dict[str, int]:
    """How many rows have each value of a column, empty fields left out."""
    if column not in rows:
        return {}
    values = rows[column][rows[column] != ""]
    return {str(value): int(count) for value, count in values.value_counts(sort=False).items()}


def _released(table: Path, digest: str) -> str | None:
    """The path of the reference table of this release that has this sha256; ``None`` of any other table.

    Where somebody changed a reference table, or took one in, no table is that of a release.
    """
    digests = recorded_digests(REFERENCE_FOLDER / DESCRIPTOR)
    lines = "".join(f"{path} {recorded}\n" for path, recorded in sorted(digests.items()))
    recorded_tables = f"{__version__} {hashlib.sha256(lines.encode()).hexdigest()}"
    if recorded_tables not in (REFERENCE_FOLDER / RELEASES).read_text(encoding="utf-8").splitlines():
        return None
    same = [path for path, recorded in digests.items() if recorded == f"sha256:{digest}"]
    return min(same, key=lambda path: REFERENCE_FOLDER / path != table.resolve(), default=None)
