"""Every combination of the components in one panel: throughput and memory above, which components are on below.

Columns are sorted by throughput, combinations without a value last. The matrix beneath follows
UpSet plots (Lex et al., IEEE TVCG 20(12), 2014): a full dot for a component that is on, a faint one for off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gpipe_bench.components import Components
from gpipe_bench.figures.marks import OTHER_MARK, VARIANT_MARKS, draw_failure, draw_median
from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.style import INK, LEFT_IN, RIGHT_IN, RULE, WIDTH_IN
from gpipe_bench.results.outcomes import Group, Outcome

_THROUGHPUT_IN: Final = 0.95
_MEMORY_IN: Final = 0.55
_SPACE_IN: Final = 0.09
_MATRIX_ROW_IN: Final = 0.125
_OFF: Final = "#D9D9D9"


def add_factorial(page: Page, group: Group) -> None:
    """Add the panel of a group to a page: one column per combination."""
    columns = group.ranked()
    width = WIDTH_IN - LEFT_IN - RIGHT_IN
    scale, unit = group.memory_scale
    names = [field.name for field in fields(Components)]

    def draw(frame: Frame) -> None:
        speed = frame.axes(LEFT_IN, width, 0.0, _THROUGHPUT_IN)
        _draw_values(speed, columns, "throughput_samples_per_s", 1.0)
        speed.set_ylabel("throughput\n(samples/s)")
        top = _THROUGHPUT_IN + _SPACE_IN
        size = frame.axes(LEFT_IN, width, top, _MEMORY_IN)
        _draw_values(size, columns, group.memory_column, scale)
        size.set_ylabel(f"memory\n({unit})")
        matrix = frame.axes(LEFT_IN, width, top + _MEMORY_IN + 0.03, len(names) * _MATRIX_ROW_IN)
        _draw_matrix(matrix, columns, names)

    page.strip(_THROUGHPUT_IN + _SPACE_IN + _MEMORY_IN + 0.03 + len(names) * _MATRIX_ROW_IN + 0.08, draw)


def _draw_values(axes: Axes, columns: Sequence[Outcome], name: str, scale: float) -> None:
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_xticks([])
    axes.grid(axis="y", linewidth=0.3, color=RULE)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    for x, outcome in enumerate(columns):
        interval = outcome.interval(name)
        if interval is None:
            for row in outcome.failed[:1]:
                draw_failure(axes, x, 0.12, row.status, axes.get_xaxis_transform())
            continue
        mark = VARIANT_MARKS.get(outcome.variant, OTHER_MARK)
        axes.plot([x, x], [scale * interval.low, scale * interval.high], color=mark.colour, linewidth=0.9)
        draw_median(axes, x, scale * interval.median, mark)
    if not any(outcome.samples(name) for outcome in columns):
        axes.set_yticks([])


def _draw_matrix(axes: Axes, columns: Sequence[Outcome], names: Sequence[str]) -> None:
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xticks([])
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    for y in range(0, len(names), 2):
        axes.axhspan(y - 0.5, y + 0.5, color="#F4F4F4", zorder=0)
    for on, colour in ((False, _OFF), (True, INK)):
        dots = [
            (x, y)
            for x, outcome in enumerate(columns)
            for y, name in enumerate(names)
            if getattr(Components.from_label(outcome.variant), name) is on
        ]
        axes.plot([x for x, _ in dots], [y for _, y in dots], "o", color=colour, markersize=2.9, markeredgewidth=0)
