"""``datapackage``: results that others can read, check and cite."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.cli.options import tell
from gpipe_bench.cli.progress import progress
from gpipe_bench.data import REFERENCE_FOLDER, needed_checkout

app = typer.Typer(help="Describe and check the reference results as a Frictionless data package.", no_args_is_help=True)

Folder = Annotated[Path | None, typer.Option(help="Folder of tables.  [default: the reference results]")]


@app.command("write")
def write(folder: Folder = None) -> None:
    """Write datapackage.json: every table with its columns, types, units, constraints, sources and hash."""
    from gpipe_bench.suite.datapackage.descriptor import write_descriptor

    typer.echo(f"wrote {write_descriptor(folder or _committed())}")


@app.command("take")
def take(
    results: Annotated[
        list[Path],
        typer.Argument(help="Tables <experiment>.csv with companions beside them, or folders of such."),
    ],
    machine: Annotated[str, typer.Option(help="Name of the folder of measured rows.  [default: from the rows]")] = "",
    folder: Folder = None,
) -> None:
    """Take simulated, emulated and measured rows of a run into the reference results, and describe them.

    Measured rows must pass `check --table`; otherwise nothing is taken, and the exit status is 1.
    """
    from gpipe_bench.suite.datapackage.check import check_taken
    from gpipe_bench.suite.datapackage.descriptor import write_descriptor
    from gpipe_bench.suite.datapackage.take import result_tables, take_reference
    from gpipe_bench.util.files import is_folder

    target = folder or _committed()
    tables = [table for place in results for table in (result_tables(place) if is_folder(place) else [place])]
    _refuse([problem for table in tables for problem in check_taken(table)])
    written = [path for table in tables for path in take_reference(table, target, machine, tell)]
    typer.echo("\n".join(f"wrote {path}" for path in [*written, write_descriptor(target)]))


@app.command("check")
def check(
    folder: Folder = None,
    table: Annotated[list[Path] | None, typer.Option(help="Measured rows to send, before they are taken.")] = None,
) -> None:
    """Check every table against datapackage.json; exit status 1 and a line per problem where one is not as it says."""
    from gpipe_bench.suite.datapackage.check import check_folder, check_sent

    if table:
        _end([problem for path in table for problem in check_sent(path)], "rows can be taken")
        return
    target = folder or _committed()
    with progress(f"checking {target}"):
        problems = check_folder(target)
    _end(problems, f"{target}: every table is as its descriptor says")


def _end(problems: list[str], well: str) -> None:
    """Print the problems and exit with status 1, or say that all is well."""
    _refuse(problems)
    typer.echo(well)


def _refuse(problems: list[str]) -> None:
    """Print the problems and exit with status 1, if there are any."""
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    if problems:
        raise typer.Exit(1)


def _committed() -> Path:
    """The committed reference results; an installed package has a part of them."""
    needed_checkout("datapackage without --folder")
    return REFERENCE_FOLDER
