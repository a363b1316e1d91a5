"""The published variants' timelines in one figure: one step of each above the next, on one axis of time.

The figure shows what the absence of each component costs. The width of a chart is the length of the step, grey is idle
time, and the title of each chart names the component added to the chart before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from gpipe_bench.components import PUBLISHED
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.chart import Chart, draw_chart, draw_legend, legend_height_in
from gpipe_bench.figures.groups import setting_words
from gpipe_bench.figures.page import Page
from gpipe_bench.figures.runs import Run, choose_run
from gpipe_bench.figures.style import FAINT, draw
from gpipe_bench.figures.tables import read_events, read_rows
from gpipe_bench.figures.text import TIMES, significant
from gpipe_bench.results.timeline import KINDS

_ADDED: Final = {
    "baseline": "no edges between micro-batches: autograd's ready queue decides the order of the backward pass",
    "dep-x-x": "+ Fork and Join: every partition goes backward from the last micro-batch to the first",
    "dep-str-x": "+ copy streams: copies run beside the computation instead of stalling both devices",
    "dep-str-ptl": "+ portals: a skip hops straight to its destination instead of riding through every partition",
}
"""What each published variant adds to the one before."""


def draw_timelines(events_csv: Path, rows_csv: Path, out_stem: Path, evidence: str = "simulated") -> list[Path]:
    """Draw one step of each published variant in the tables.

    Args:
        events_csv: columns cell, variant, repeat, evidence and those of a timeline event.
        rows_csv: the rows of the same runs.
        out_stem: path of the figure without its suffix.
        evidence: ``simulated``, ``emulated`` or ``measured``.

    Returns:
        The paths written: SVG, PDF, PNG.

    Raises:
        ConfigError: a table cannot be read or lacks a column, or holds no published variant of that evidence.
        OutputError: the figure cannot be written.
    """
    events, rows = read_events(events_csv), read_rows(rows_csv)
    known = {row.variant for row in rows if row.evidence == evidence}
    asked: list[str] = [variant for variant in PUBLISHED if variant in known]
    runs = {variant: choose_run(events, rows, variant, evidence) for variant in asked}
    if not runs:
        raise ConfigError(
            [f"rows must hold published variants that are {evidence}, got none in {rows_csv}; use another --evidence"]
        )
    return draw(timelines_figure, runs, out_stem)


def timelines_figure(runs: Mapping[str, Run]) -> Figure:
    """The figure of some runs by variant, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page()
    head = next(iter(runs.values())).row
    page.heading(f"{head.model}: one training step of each published variant, on one axis of time", head.evidence)
    page.paragraph(setting_words(head), colour=FAINT)
    drawn = {variant: Chart(run.events) for variant, run in runs.items() if run.events}
    longest_us = max((chart.span_us for chart in drawn.values()), default=0.0)
    base = runs.get(PUBLISHED[0])
    for variant, run in runs.items():
        page.space(0.10)
        page.paragraph(f"{variant}: {_summary(run, drawn.get(variant), base)}", bold=True)
        page.paragraph(_ADDED[variant], colour=FAINT)
        if variant in drawn:
            page.space(0.13)
            chart = Chart(run.events, longest_us, short=True)
            _add_chart(page, chart, last=variant == list(drawn)[-1])
    kinds = [kind for kind in KINDS if any(kind in chart.kinds for chart in drawn.values())]
    if kinds:
        page.space(0.04)
        page.strip(legend_height_in(kinds), lambda frame: draw_legend(frame, kinds))
    return page.render()


def _add_chart(page: Page, chart: Chart, *, last: bool) -> None:
    idle = chart.idle_fractions()
    page.strip(chart.height_in + (0.30 if last else 0.03), lambda frame: draw_chart(frame, chart, idle, axis=last))


def _summary(run: Run, chart: Chart | None, base: Run | None) -> str:
    """Speed, gain over the baseline, memory and idle share; why there is nothing where a run failed."""
    row = run.row
    if chart is None or row.throughput_samples_per_s is None:
        return run.remark or row.reason
    parts = [f"{significant(row.throughput_samples_per_s)} samples/s"]
    if base and base is not run and base.row.throughput_samples_per_s:
        parts[0] += f" ({row.throughput_samples_per_s / base.row.throughput_samples_per_s:.2f}{TIMES})"
    memory = row.peak_reserved_gib if row.peak_reserved_gib is not None else row.peak_allocated_gib
    if memory is not None:
        parts.append(f"{significant(memory)} GiB")
    idle = chart.idle_fractions()
    parts.append(f"idle {sum(idle) / len(idle):.0%}")
    return ", ".join(parts) + (f"; {run.remark}" if run.remark else "")
