"""``diff``: where two traces of rows part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def diff(
    first: Annotated[Path, typer.Argument(help="A trace, as simulate or emulate --trace FILE.jsonl writes it.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Say in which row two traces part first; exit status 1 if they do.

    Rows may differ in their durations, which are counted.
    """
    from gpipe_bench.machine.trace_file import difference, differences_text, read_trace

    found = difference(read_trace(first), read_trace(second))
    typer.echo(differences_text(found, [str(first), str(second)]))
    if found.row is not None:
        raise typer.Exit(1)
