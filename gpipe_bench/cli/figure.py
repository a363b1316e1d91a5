"""``figure``: what is drawn from CSV alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.cli.options import Processes, named, stem
from gpipe_bench.cli.progress import progress

app = typer.Typer(help="Draw figures from tables: SVG, PDF and PNG.", no_args_is_help=True)

Rows = Annotated[Path, typer.Option(help="Table of rows, as collect wrote it.")]
Out = Annotated[Path, stem("Path of the figure without its suffix.")]


@app.command("ablation")
def ablation(rows: Rows, out: Out) -> None:
    """Draw throughput and memory of every variant with intervals."""
    from gpipe_bench.figures.ablation import draw_ablation

    _say(draw_ablation(rows, out))


@app.command("shares")
def shares(rows: Rows, out: Out) -> None:
    """Draw the share of each component in speed and memory, whatever the order (Shapley values)."""
    from gpipe_bench.figures.shares import shares_figure
    from gpipe_bench.figures.style import draw
    from gpipe_bench.figures.tables import read_rows

    _say(draw(shares_figure, read_rows(rows), out))


@app.command("timelines")
def timelines(
    events: Annotated[Path, typer.Option(help="Table of timeline events, as collect wrote it.")],
    rows: Rows,
    out: Out,
    evidence: Annotated[str, named("evidence", "Kind of run to draw: measured, emulated or simulated.")] = "simulated",
) -> None:
    """Draw one step of each published variant above each other, on one axis of time."""
    from gpipe_bench.figures.timelines import draw_timelines

    _say(draw_timelines(events, rows, out, evidence))


@app.command("timeline")
def timeline(
    events: Annotated[Path, typer.Option(help="Table of timeline events, as collect wrote it.")],
    rows: Rows,
    variant: Annotated[str, named("variant", "Label of the components, such as dep-str-ptl.")],
    out: Out,
    evidence: Annotated[str, named("evidence", "Kind of run to draw: measured, emulated or simulated.")] = "measured",
) -> None:
    """Draw one step of one variant: what ran when on each device."""
    from gpipe_bench.figures.timeline import draw_timeline

    _say(draw_timeline(events, rows, variant, out, evidence))


@app.command("sweep")
def sweep(rows: Rows, out: Out) -> None:
    """Draw throughput over partitions and micro-batches, a map per checkpoint mode and kind of batch."""
    from gpipe_bench.figures.sweep import draw_sweep

    _say(draw_sweep(rows, out))


@app.command("why")
def why(rows: Rows, out: Out) -> None:
    """Draw what the device time of a sample goes into, with more devices and with more chunks."""
    from gpipe_bench.figures.style import draw
    from gpipe_bench.figures.tables import read_rows
    from gpipe_bench.figures.why import why_figure

    _say(draw(why_figure, read_rows(rows), out))


@app.command("schedules")
def schedules(
    rows: Rows,
    out: Out,
    part: Annotated[str, typer.Option(help="pareto, scaling, bubbles or timelines.")] = "pareto",
) -> None:
    """Draw schedules beside each other; needs the tables of devices, or of events, beside the rows."""
    from gpipe_bench.figures.schedule_parts import draw_schedules

    _say(draw_schedules(rows, out, part))


@app.command("tables")
def tables(
    rows: Rows,
    out: Out,
    metric: Annotated[
        str, typer.Option(help="throughput_samples_per_s or peak_reserved_gib.  [default: the published metric]")
    ] = "",
) -> None:
    """Draw published tables: published, simulated, emulated and measured values of each row."""
    from gpipe_bench.figures.published_tables import draw_published_tables

    _say(draw_published_tables(rows, out, metric))


@app.command("advice")
def advice(rows: Rows, out: Out) -> None:
    """Draw what advise tried: the best chunks and balance, and what other choices cost."""
    from gpipe_bench.figures.advice import advice_figure
    from gpipe_bench.figures.style import draw
    from gpipe_bench.figures.tables import read_rows

    _say(draw(advice_figure, read_rows(rows), out))


@app.command("reference")
def reference(
    out: Annotated[Path, typer.Option(help="Folder of the figures.")] = Path("figures/reference"),
    tables: Annotated[
        Path | None, typer.Option(help="Folder of the reference tables.  [default: results/reference]")
    ] = None,
    processes: Processes = 1,
) -> None:
    """Draw every figure of the reference tables."""
    from gpipe_bench.data import REFERENCE_FOLDER
    from gpipe_bench.figures.reference import draw_reference
    from gpipe_bench.results.catalogue import reference_figures

    folder = tables or REFERENCE_FOLDER
    total = len(reference_figures(folder))
    with progress("drawing") as task:
        for number, paths in enumerate(draw_reference(out, folder, processes), start=1):
            task.line(f"wrote {', '.join(map(str, paths))}")
            task.step(number, total)


def _say(paths: Iterable[Path]) -> None:
    typer.echo(f"wrote {', '.join(map(str, paths))}")
