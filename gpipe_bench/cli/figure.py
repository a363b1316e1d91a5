"""``figure ablation`` and ``figure timeline``: drawn from CSV alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Draw figures from tables: SVG, PDF and PNG.", no_args_is_help=True)

Rows = Annotated[Path, typer.Option(help="Table of rows, as collect wrote it.")]
Out = Annotated[Path, typer.Option(help="Path of the figure without its suffix.")]


@app.command("ablation")
def ablation(rows: Rows, out: Out) -> None:
    """Draw throughput and memory of every variant with intervals."""
    from gpipe_bench.figures.ablation import draw_ablation

    _say(draw_ablation(rows, out))


@app.command("timeline")
def timeline(
    events: Annotated[Path, typer.Option(help="Table of timeline events, as collect wrote it.")],
    rows: Rows,
    variant: Annotated[str, typer.Option(help="Label of the components, such as dep-str-ptl.")],
    out: Out,
) -> None:
    """Draw one step of one variant: what ran when on each device."""
    from gpipe_bench.figures.timeline import draw_timeline

    _say(draw_timeline(events, rows, variant, out))


def _say(paths: Iterable[Path]) -> None:
    typer.echo(f"wrote {', '.join(map(str, paths))}")
