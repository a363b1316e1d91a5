"""``verify``: results against print, reference and promises; exit status 1 when a cell is outside its tolerance."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gpipe_bench.data import REFERENCE_FOLDER, TOLERANCES
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.catalogue import reference_companions, reference_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpipe_bench.suite.evaluation.verify import Check

_SHOWN: Final = 5
_PREDICTIONS: Final = "predictions"
_CLAIMS: Final = "claims"
_NEEDED: Final = ("evidence", "model", "variant", "partitions", "chunks", "checkpoint", "batch_size", "balance")


def verify(
    tables: Annotated[
        list[Path] | None, typer.Argument(help="Tables of rows, held to the reference tables of the same names.")
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="Table of all checks.")] = Path("results/verify.csv"),
    tolerances: Annotated[
        Path | None, typer.Option(help="What may be off by how much.  [default: config/tolerances.csv]")
    ] = None,
    predictions: Annotated[Path | None, typer.Option(help="Table of published and simulated values.")] = None,
    claims: Annotated[Path | None, typer.Option(help="Verdicts of the transparency experiment.")] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Folder of the reference results.  [default: results/reference]")
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(help="Name of a table that may lack cells of the reference, predictions, claims, or all; repeat."),
    ] = None,
) -> None:
    """Check results and say which cell is outside which tolerance, or not there; exit status 1 when there is one."""
    from gpipe_bench.measure.host import host_facts
    from gpipe_bench.results.tables import csv_text
    from gpipe_bench.suite.evaluation.verify import (
        CHECK_COLUMNS,
        checks_of_claims,
        checks_of_predictions,
        judge,
        left_out,
        read_tolerances,
        records,
    )
    from gpipe_bench.util.files import check_writable, write_files

    others = {_PREDICTIONS: predictions, _CLAIMS: claims}
    known = {"all", *(table.stem for table in tables or []), *(name for name, path in others.items() if path)}
    if unknown := sorted(set(part or ()) - known):
        raise typer.BadParameter(f"--part must be one of {', '.join(sorted(known))}, got {', '.join(unknown)}")
    if not (tables or predictions or claims):
        raise ConfigError(["results must be tables, --predictions or --claims, got none; name what to verify"])
    check_writable(out, inputs=[*(tables or ()), predictions, claims, tolerances])
    limits = read_tolerances(tolerances or TOLERANCES)
    reference = reference or REFERENCE_FOLDER
    found: defaultdict[str, list[Check]] = defaultdict(list)
    if predictions:
        found[_PREDICTIONS] += checks_of_predictions(predictions, reference_companions("predictions", reference))
    for table in tables or []:
        found[table.stem] += _of_table(table, reference)
    if claims:
        olds = reference_companions("transparency_verdict", reference)
        found[_CLAIMS] += checks_of_claims(claims, olds, limits)
    for name in found if "all" in (part or ()) else found.keys() & set(part or ()):
        found[name] = [left_out(check) for check in found[name]]
    checks = judge(chain(*found.values()), limits)
    write_files({out: csv_text(CHECK_COLUMNS, records(checks, host_facts()))})
    counts = Counter(check.verdict for check in checks)
    for check in checks:
        if check.verdict == "OUTSIDE":
            typer.echo(check.line(), err=True)
    judged = iter(checks)
    for name, some in found.items():
        _report_missing(name, list(islice(judged, len(some))))
    counted = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    summary = f"{len(checks)} checks: {counted or 'nothing to check'}; wrote {out}"
    if counts["OUTSIDE"] or counts["MISSING"] or not checks:
        typer.echo(f"error: {summary}", err=True)
        raise typer.Exit(1)
    typer.echo(summary)


def _report_missing(name: str, checks: Sequence[Check]) -> None:
    """Name the first cells or lines that one table lacks, and count the others."""
    missing = [check for check in checks if check.verdict == "MISSING"]
    for check in missing[:_SHOWN]:
        typer.echo(check.line(), err=True)
    if len(missing) > _SHOWN:
        what = "lines" if missing[0].metric else "cells"
        typer.echo(f"and {len(missing) - _SHOWN} more {what} of {name} that are not here", err=True)
    if missing:
        typer.echo(f"run the rest of it, or allow a part: --part {name}", err=True)


def _of_table(table: Path, reference: Path) -> list[Check]:
    """The checks of a table of rows against the reference tables of its name."""
    import pandas as pd

    from gpipe_bench.results.rows import Row
    from gpipe_bench.results.tables import frame_of, read_table
    from gpipe_bench.suite.evaluation.verify import check_configurations, checks_of_emulations, checks_of_rows

    rows = read_table(table, _NEEDED, Row)
    check_configurations(table, rows)
    olds = [path for path in reference_tables(reference) if path.stem == table.stem]
    known = pd.concat([read_table(old, _NEEDED, Row) for old in olds]) if olds else frame_of([], Row)
    found = list(checks_of_rows(table.stem, rows, known))
    if all(check.verdict for check in found):
        typer.echo(f"{table}: no cell of it is among the reference rows", err=True)
    return [*found, *checks_of_emulations(table.stem, rows)]
