"""``compare``: whether two result sets differ, cell by cell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from gpipe_bench.rows import Row

__all__ = ["compare"]

_NEEDED: Final = ("evidence", "model", "variant", "partitions", "chunks", "status", "throughput_samples_per_s")


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Reference: a table of rows, or a folder of such tables.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What is compared with it: a table or a folder.")],
    *,
    metric: Annotated[list[str] | None, typer.Option(help="Column to compare; repeat for several.")] = None,
    across: Annotated[
        list[str] | None, typer.Option(help="Column in which the two sides of a cell may differ, such as evidence.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file for all comparisons, a line per cell and metric.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with status 1 where a cell differs.")] = False,
) -> None:
    """Tell whether two result sets differ, cell by cell, with ratio, 95 % interval, test and verdict.

    Cells are the same when model, variant and setting are; machine and versions may differ. P-values are adjusted
    for the number of measured cells, and a cell with too few repeats for that says how many it needs.
    """
    from rich.console import Console

    from gpipe_bench.bench.compare import compare_rows, distinct_rows
    from gpipe_bench.bench.compare_table import RECORD_COLUMNS, comparison_records, comparison_view
    from gpipe_bench.bench.files import write_files
    from gpipe_bench.bench.tables import csv_text
    from gpipe_bench.errors import ConfigError

    old, new = distinct_rows(_rows(a)), distinct_rows(_rows(b))
    console = Console(highlight=False)
    if not console.is_terminal or console.width < 120:
        console = Console(highlight=False, width=150)
    records, alike = [], True
    for name in metric or ["throughput_samples_per_s"]:
        try:
            cells = compare_rows(new, old, name, across=tuple(across or ()))
        except ValueError as error:
            raise ConfigError([str(error)]) from error
        console.print(comparison_view(cells, name))
        records += comparison_records(cells, name)
        alike = alike and all(cell.alike for cell in cells)
    if out:
        write_files({out: csv_text(RECORD_COLUMNS, records)})
        typer.echo(f"wrote {out}")
    if check and not alike:
        raise typer.Exit(1)


def _rows(place: Path) -> list[Row]:
    """The rows of a table, or of all tables of rows in a folder; of those below it where it has none itself."""
    from gpipe_bench.errors import ConfigError
    from gpipe_bench.figures.tables import read_rows

    if not place.is_dir():
        return read_rows(place, _NEEDED)
    paths = _tables(sorted(place.glob("*.csv"))) or _tables(sorted(place.rglob("*.csv")))
    if not paths:
        raise ConfigError(
            [f"folder must hold tables of rows, got none in {place}; name <experiment>.csv or its folder"]
        )
    return [row for path in paths for row in read_rows(path, _NEEDED)]


def _tables(paths: list[Path]) -> list[Path]:
    """Those with the columns of rows."""
    return [
        path for path in paths if set(_NEEDED) <= set(path.read_text(encoding="utf-8").partition("\n")[0].split(","))
    ]
