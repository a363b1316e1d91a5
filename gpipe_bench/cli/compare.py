"""``compare``: whether two result sets differ, cell by cell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gpipe_bench.cli.progress import progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpipe_bench.suite.evaluation.compare import AnyRow, CellComparison

_NEEDED: Final = ("evidence", "model", "variant", "partitions", "chunks", "status", "throughput_samples_per_s")


_Metric = Annotated[
    list[str] | None,
    typer.Option(
        help="Column to compare; repeat for several.  [default: of measured rows the throughput, host time of tiny "
        "layers in the race; of others all columns of values]"
    ),
]
_Across = Annotated[
    list[str] | None, typer.Option(help="Column in which the two sides of a cell may differ, such as evidence.")
]
_Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Exit with status 1 where a cell differs; with status 3 where nothing "
        "differs, but measured cells have too few repeats to tell; with 0 where all are equal, or no difference shows.",
    ),
]
_CANNOT_TELL: Final = 3


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Reference: a table of rows, or a folder of such tables.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What is compared with it: a table or a folder.")],
    *,
    metric: _Metric = None,
    across: _Across = None,
    out: Annotated[Path | None, typer.Option(help="CSV file for all comparisons, a line per cell and metric.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every cell, not only those that differ.")] = False,
    check: _Check = False,
) -> None:
    """Tell whether two result sets differ, cell by cell, with ratio, 95 % interval, test and verdict.

    Cells are the same when model, variant and setting are; machine and versions may differ. A measured cell has a
    Mann-Whitney test on its repeats, four or more on each side; p-values are adjusted for the number of cells, so that
    something differs once in twenty times at most where nothing does. A cell with too few repeats says how many it
    needs. Simulated cells are equal within 1e-9 of each value, or differ.
    """
    from gpipe_bench.results.tables import csv_text
    from gpipe_bench.suite.evaluation.compare import (
        RECORD_COLUMNS,
        comparison_records,
        comparison_view,
        differ,
        distinct_rows,
        undecided,
        verdict_view,
    )
    from gpipe_bench.util.console import output
    from gpipe_bench.util.files import check_writable, write_files

    check_writable(out, inputs=[a, b])
    with progress("comparing"):
        compared = _compared(distinct_rows(_rows(b)), distinct_rows(_rows(a)), metric, tuple(across or ()))
        views = [comparison_view(cells, name, every=every) for name, cells in compared.items()]
        views.append(verdict_view(compared))
    console = output()
    for view in views:
        console.print(view)
    if out:
        records = [record for name, cells in compared.items() for record in comparison_records(cells, name)]
        write_files({out: csv_text(RECORD_COLUMNS, records)})
        typer.echo(f"wrote {out}")
    if check and differ(compared):
        raise typer.Exit(1)
    if check and undecided(compared):
        raise typer.Exit(_CANNOT_TELL)


def _compared(
    new: Sequence[AnyRow], old: Sequence[AnyRow], metric: list[str] | None, across: tuple[str, ...]
) -> dict[str, list[CellComparison]]:
    """The cells by metric; of those that are compared by default, the metrics that some row has."""
    from gpipe_bench.errors import ConfigError
    from gpipe_bench.suite.evaluation.compare import METRICS, compare_rows

    compared = {}
    for name in metric or METRICS:
        sides = [rows if metric else _usual(rows, name, throughput_alone=bool(across)) for rows in (new, old)]
        if any(sides) or name == METRICS[0]:
            try:
                compared[name] = compare_rows(sides[0], sides[1], name, across=across)
            except ValueError as error:
                raise ConfigError([str(error)]) from error
    return compared


def _usual(rows: Sequence[AnyRow], metric: str, *, throughput_alone: bool) -> list[AnyRow]:
    """The rows of which a metric is compared where none was asked for.

    Different kinds of evidence do not give the same columns: across them, throughput is what both have.
    """
    from gpipe_bench.suite.evaluation.compare import METRICS, usual_metrics

    if throughput_alone and metric != METRICS[0]:
        return []
    return [row for row in rows if metric in usual_metrics(row)]


def _rows(place: Path) -> list[AnyRow]:
    """The rows of a table, or of all tables of rows in a folder; of those below it where it has none itself."""
    from gpipe_bench.errors import ConfigError
    from gpipe_bench.util.files import is_folder

    if not is_folder(place):
        return _read(place)
    paths = _tables(sorted(place.glob("*.csv"))) or _tables(sorted(place.rglob("*.csv")))
    if not paths:
        raise ConfigError(
            [f"folder must hold tables of rows, got none in {place}; name <experiment>.csv or its folder"]
        )
    return [row for path in paths for row in _read(path)]


def _read(path: Path) -> list[AnyRow]:
    """The rows of a table, those of the race of peers with their contenders."""
    from gpipe_bench.figures.tables import is_race, read_peers, read_rows

    return [*read_peers(path)] if is_race(path) else [*read_rows(path, _NEEDED)]


def _tables(paths: list[Path]) -> list[Path]:
    """Those with the columns of rows."""
    from gpipe_bench.results.tables import read_text

    return [path for path in paths if set(_NEEDED) <= set(read_text(path).columns)]
