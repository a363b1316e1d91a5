"""``report``: everything that was found, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.cli.progress import progress


def report(
    out: Annotated[Path, typer.Option(help="The page to write, one HTML file.")],
    results: Annotated[
        Path, typer.Option(help="Folder of tables: of a run, or results/reference with the committed results.")
    ] = Path("results"),
    figures: Annotated[
        Path | None,
        typer.Option(help="Folder of figures, SVG.", show_default="the path of --results, 'figures' for 'results'"),
    ] = None,
) -> None:
    """Write the answer, figures, tables and interactive timelines as one HTML file that needs no network."""
    from gpipe_bench.report.page import write_report
    from gpipe_bench.util.files import check_writable

    check_writable(out)
    with progress("making the page") as task:
        written = write_report(results, figures, out, task.step)
    typer.echo(f"wrote {written}")
