"""``figure``: what is drawn from CSV alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.cli.options import Processes, named, stem
from gpipe_bench.cli.progress import progress
from gpipe_bench.errors import ConfigError

_SCHEDULES = ("schedules_pareto", "schedules_scaling", "schedules_bubbles", "schedules_timelines")
_NAMES = (
    "ablation",
    "shares",
    "timelines",
    "tables",
    "sweep",
    "why",
    "advice",
    *_SCHEDULES,
    "networks",
    "zero_bubble",
    "verdicts",
)


def figure(
    name: Annotated[str, typer.Argument(help=f"{', '.join(_NAMES)}; or reference: all figures of reference tables.")],
    out: Annotated[Path, stem("Path of the figure without its suffix; of reference a folder.")],
    rows: Annotated[
        Path | None, typer.Option(help="Table of rows; of reference a folder.  [default: results/reference]")
    ] = None,
    *,
    evidence: Annotated[
        str,
        named(
            "evidence",
            "Kind of run to draw: measured, emulated or simulated.  [default: a figure for each kind in the table]",
        ),
    ] = "",
    variant: Annotated[str, named("variant", "timelines: the variant to draw.  [default: the published ones]")] = "",
    processes: Processes = 1,
) -> None:
    """Draw a figure from a table of rows: SVG, PDF and PNG."""
    if name not in (*_NAMES, "reference"):
        raise ConfigError([f"figure must be one of {', '.join(_NAMES)} or reference, got {name!r}; use one of them"])
    from gpipe_bench.util.files import check_writable

    if name == "reference":
        check_writable(out / "ablation.svg")
        _reference(out, rows, processes)
        return
    if rows is None:
        raise ConfigError(["--rows must be a table of rows, got none; name the CSV file to draw"])
    check_writable(out.with_name(f"{out.name}.svg"), inputs=[rows])
    from gpipe_bench.figures.base import Selection
    from gpipe_bench.figures.registry import FIGURES
    from gpipe_bench.figures.tables import evidence_in

    kinds = [evidence] if evidence else evidence_in(rows)
    for kind in kinds:
        stem_of = out if len(kinds) == 1 else out.with_name(f"{out.name}_{kind}")
        paths = FIGURES[name].draw(rows, stem_of, Selection(kind, variant=variant))
        typer.echo(f"wrote {', '.join(map(str, paths))}")


def _reference(out: Path, tables: Path | None, processes: int) -> None:
    from gpipe_bench.data import REFERENCE_FOLDER
    from gpipe_bench.figures.registry import draw_reference
    from gpipe_bench.results.catalogue import reference_figures

    folder = tables or REFERENCE_FOLDER
    total = len(reference_figures(folder))
    with progress("drawing") as task:
        for number, paths in enumerate(draw_reference(out, folder, processes), start=1):
            task.line(f"wrote {', '.join(map(str, paths))}")
            task.step(number, total)
