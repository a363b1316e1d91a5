"""The timeline figure: which run is drawn, its title, and the chart of its step."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from gpipe_bench.figures.chart import add_chart
from gpipe_bench.figures.groups import setting_words
from gpipe_bench.figures.page import Page
from gpipe_bench.figures.runs import Run, choose_run
from gpipe_bench.figures.style import FAINT, draw
from gpipe_bench.figures.tables import read_events, read_rows
from gpipe_bench.results.rows import Row


def draw_timeline(
    events_csv: Path, rows_csv: Path, variant: str, out_stem: Path, evidence: str = "measured"
) -> list[Path]:
    """Draw one step of one variant.

    Args:
        events_csv: columns cell, variant, repeat, evidence and those of a timeline event.
        rows_csv: the rows of the same runs.
        variant: label of the components.
        out_stem: path of the figure without its suffix.
        evidence: ``measured``, ``emulated`` or ``simulated``.

    Returns:
        The paths written: SVG, PDF, PNG.

    Raises:
        ConfigError: a table cannot be read or lacks a column, or the variant is unknown or was not recorded.
        OutputError: the figure cannot be written.
    """
    run = choose_run(read_events(events_csv), read_rows(rows_csv), variant, evidence)
    return draw(partial(timeline_figure, variant=variant), run, out_stem)


def timeline_figure(run: Run, variant: str) -> Figure:
    """The figure of one run, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page()
    page.heading(f"{run.row.model}: timeline of {variant}", run.row.evidence)
    if run.remark:
        page.paragraph(run.remark, bold=True)
    page.paragraph(setting_words(run.row), colour=FAINT)
    if run.events:
        add_chart(page, run.events, _step(run.row))
    return page.render()


def _step(row: Row) -> str:
    """The recorded step; only measured ones are of a repeat."""
    return f"{row.evidence} step" + (f" of repeat {row.repeat or 0}" if row.evidence == "measured" else "")
