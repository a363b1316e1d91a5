"""The ablation of a CPU in one panel: throughput over that of the plain loop, and memory, a line per way to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes

from gpipe_bench.figures.marks import Mark, draw_interval, draw_samples
from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.published import (
    AXIS_IN,
    COLUMN_IN,
    GAP_IN,
    ROW_IN,
    draw_absence,
    fit_limits,
    label,
    rule_lines,
)
from gpipe_bench.figures.style import INK, LEFT_IN, OKABE_ITO
from gpipe_bench.figures.text import TIMES, significant
from gpipe_bench.results.labels import LOOP, MICROBATCH_LOOP, PAPER
from gpipe_bench.results.outcomes import THROUGHPUT, CpuGroup, Outcome

CPU_READING: Final = (
    "Plain loop: the nn.Sequential without a pipeline, the whole batch at once in one thread, nothing recomputed. "
    "Micro-batch loop: the same for one micro-batch after another. "
    "Paper's executor: a thread per partition, and autograd runs the backward pass. Below it: schedules of the runtime."
)
"""What the lines of the panel are."""

_MARKS: Final = {
    LOOP: Mark("o", OKABE_ITO["black"], 4.0),
    MICROBATCH_LOOP: Mark("D", OKABE_ITO["black"], 3.4),
    PAPER: Mark("^", OKABE_ITO["orange"], 4.6),
}
_SCHEDULE: Final = Mark("s", OKABE_ITO["blue"], 3.8)


def add_cpu(page: Page, group: CpuGroup) -> None:
    """Add the panel of a group to a page, the plain loop first."""
    outcomes = group.ordered()
    scale, unit = group.memory_scale
    height = len(outcomes) * ROW_IN

    def draw(frame: Frame) -> None:
        speed = frame.axes(LEFT_IN, COLUMN_IN, 0.0, height)
        _draw_ratios(speed, outcomes, group.baseline)
        speed.set_xlabel(f"throughput ({TIMES} {LOOP})")
        speed.set_yticks(range(len(outcomes)), [outcome.variant for outcome in outcomes])
        size = frame.axes(LEFT_IN + COLUMN_IN + GAP_IN, COLUMN_IN, 0.0, height)
        _draw_memory(size, outcomes, group.memory_column, scale)
        size.set_xlabel(f"peak live tensors ({unit})")
        size.set_yticks(range(len(outcomes)), [])

    page.strip(height + AXIS_IN, draw)


def _draw_ratios(axes: Axes, outcomes: Sequence[Outcome], loop: Outcome | None) -> None:
    base = loop.middle(THROUGHPUT) if loop else None
    samples = {o.variant: [value / base for value in o.samples(THROUGHPUT)] if base else [] for o in outcomes}
    rule_lines(axes, len(outcomes))
    ratios = [ratio for outcome in outcomes if (ratio := outcome.ratio(loop))]
    ends = [end for ratio in ratios for end in (ratio.low, ratio.high)]
    fit_limits(axes, [1.0, *ends, *(value for values in samples.values() for value in values)] if base else [])
    for y, outcome in enumerate(outcomes):
        ratio, mark = outcome.ratio(loop), _MARKS.get(outcome.variant, _SCHEDULE)
        if ratio:
            draw_interval(axes, ratio, 1.0, y + 0.14, mark)
            label(axes, ratio.median, y, f"{ratio.median:.2f}{TIMES}")
        elif base and outcome is loop:
            axes.axvline(1.0, linewidth=0.5, color=INK, zorder=0)
            label(axes, 1.0, y, f"{significant(base)} samples/s")
        else:
            draw_absence(axes, y, outcome)
        draw_samples(axes, samples[outcome.variant], 1.0, y + 0.34, mark)


def _draw_memory(axes: Axes, outcomes: Sequence[Outcome], column: str, scale: float) -> None:
    rule_lines(axes, len(outcomes))
    fit_limits(axes, [scale * value for outcome in outcomes for value in outcome.samples(column)])
    for y, outcome in enumerate(outcomes):
        if interval := outcome.interval(column):
            draw_interval(axes, interval, scale, y + 0.14, _MARKS.get(outcome.variant, _SCHEDULE))
            label(axes, scale * interval.median, y, significant(scale * interval.median))
        else:
            draw_absence(axes, y, outcome)
