"""``verify``: results against print, reference and promises; exit status 1 when a cell is outside its tolerance."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gpipe_bench.catalogue import REFERENCE, reference_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpipe_bench.bench.verify import Check

__all__ = ["verify"]

_SHOWN: Final = 5
_NEEDED: Final = ("evidence", "model", "variant", "partitions", "chunks", "checkpoint", "batch_size", "balance")


def verify(
    tables: Annotated[
        list[Path] | None, typer.Argument(help="Tables of rows, held to the reference tables of the same names.")
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="Table of all checks.")] = Path("results/verify.csv"),
    tolerances: Annotated[Path, typer.Option(help="What may be off by how much.")] = Path("config/tolerances.csv"),
    predictions: Annotated[Path | None, typer.Option(help="Table of published and simulated values.")] = None,
    claims: Annotated[Path | None, typer.Option(help="Verdicts of the transparency experiment.")] = None,
    reference: Annotated[Path, typer.Option(help="Folder of the reference results.")] = REFERENCE,
    part: Annotated[
        list[str] | None,
        typer.Option(help="Name of a table that may lack cells of the reference, or all; repeat for several."),
    ] = None,
) -> None:
    """Check results and say which cell is outside which tolerance, or not there; exit status 1 when there is one."""
    from gpipe_bench.bench.files import check_writable, write_files
    from gpipe_bench.bench.tables import csv_text
    from gpipe_bench.bench.verify import (
        CHECK_COLUMNS,
        checks_of_claims,
        checks_of_predictions,
        judge,
        read_tolerances,
        records,
    )
    from gpipe_bench.measure.host import host_facts

    known = {"all", *(table.stem for table in tables or [])}
    if unknown := sorted(set(part or ()) - known):
        raise typer.BadParameter(f"--part must be one of {', '.join(sorted(known))}, got {', '.join(unknown)}")
    check_writable(out)
    limits, found = read_tolerances(tolerances), []
    found += list(checks_of_predictions(predictions)) if predictions else []
    for table in tables or []:
        found += _of_table(table, reference, allowed=bool({"all", table.stem} & set(part or ())))
    found += list(checks_of_claims(claims)) if claims else []
    checks = judge(found, limits)
    write_files({out: csv_text(CHECK_COLUMNS, records(checks, host_facts()))})
    counts = Counter(check.verdict for check in checks)
    for check in checks:
        if check.verdict == "OUTSIDE":
            typer.echo(check.line(), err=True)
    _report_missing(checks)
    bad = counts["OUTSIDE"] + counts["MISSING"]
    summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    typer.echo(f"{len(checks)} checks: {summary or 'nothing to check'}; wrote {out}", err=bool(bad))
    if bad or not checks:
        raise typer.Exit(1)


def _report_missing(checks: Sequence[Check]) -> None:
    """Name the first missing cells of each table, and count the others."""
    missing = [check for check in checks if check.verdict == "MISSING"]
    for table in dict.fromkeys(check.table for check in missing):
        own = [check for check in missing if check.table == table]
        for check in own[:_SHOWN]:
            typer.echo(check.line(), err=True)
        if len(own) > _SHOWN:
            typer.echo(f"and {len(own) - _SHOWN} more cells of {table} that are not here", err=True)
        typer.echo(f"run the rest of it, or allow a part: --part {table}", err=True)


def _of_table(table: Path, reference: Path, *, allowed: bool) -> list[Check]:
    """The checks of a table of rows against the reference tables of its name; lacking cells may be allowed."""
    from gpipe_bench.bench.verify import checks_of_rows, missing_cells
    from gpipe_bench.figures.tables import read_rows

    rows = read_rows(table, _NEEDED)
    olds = [path for path in reference_tables(reference) if path.stem == table.stem]
    known = [row for old in olds for row in read_rows(old, _NEEDED)]
    found = list(checks_of_rows(table.stem, rows, known))
    if not found:
        typer.echo(f"{table}: no cell of it is among the reference rows", err=True)
    return [*found, *missing_cells(table.stem, rows, known, allowed=allowed)]
