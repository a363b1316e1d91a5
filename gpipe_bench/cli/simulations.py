"""``simulate-published``: a published table, for the workflow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.bench.storage.raw import results_json
from gpipe_bench.cli.cells import row_words
from gpipe_bench.cli.progress import progress
from gpipe_bench.util.files import check_writable, write_files


def simulate_published(
    table: Annotated[str, typer.Argument(help="A published table, such as unet-speed.")],
    out: Annotated[Path, typer.Option(help="The raw results to write, one JSON file.")],
) -> None:
    """Simulate the rows of a published table on the hardware and with the settings that they were run with."""
    from gpipe_bench.bench.published.simulations import simulate_table

    check_writable(out)
    with progress(f"simulating {table}") as task:
        results = simulate_table(table, lambda row: task.line(row_words(row)))
    write_files({out: results_json(results)})
    typer.echo(f"wrote {out} with {len(results)} simulated rows")
