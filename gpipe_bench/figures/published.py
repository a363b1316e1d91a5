"""The published variants of the ablation in one panel: throughput and memory, each with interval and repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gpipe_bench.components import PUBLISHED
from gpipe_bench.figures.marks import VARIANT_MARKS, draw_failure, draw_interval, draw_samples
from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.style import EVIDENCE_COLOURS, FAINT, FONT_PT, INK, LEFT_IN, RIGHT_IN, RULE, WIDTH_IN
from gpipe_bench.figures.text import TIMES, significant, text_width_pt
from gpipe_bench.results.outcomes import Group, Outcome

_BESIDE: Final[dict[str, dict[str, Any]]] = {
    "published": {"marker": "d", "markersize": 6.5, "markeredgecolor": INK},
    "simulated": {"marker": "o", "markersize": 6.0, "markeredgecolor": EVIDENCE_COLOURS["simulated"]},
}
"""Marks of the values of other evidence."""

_WORDS: Final = {
    "published": "Open diamonds: the published values.",
    "simulated": "Open circles: simulated, with the same autograd engine.",
}

GAP_IN: Final = 0.14
COLUMN_IN: Final = (WIDTH_IN - LEFT_IN - GAP_IN - RIGHT_IN) / 2
ROW_IN: Final = 0.27
AXIS_IN: Final = 0.33
"""Sizes of a panel of two columns, in inches."""


def beside_words(beside: Sequence[Group]) -> list[str]:
    """How to read the marks of groups beside another."""
    return [_WORDS[other.head.evidence] for other in beside]


def add_published(page: Page, group: Group, beside: Sequence[Group] = ()) -> None:
    """Add the panel of a group to a page: one line per published variant, in the order of print.

    Args:
        page: where to add it.
        group: what is shown.
        beside: values of the same pipeline of other evidence.
    """
    outcomes = [group.outcomes.get(variant, Outcome(variant)) for variant in PUBLISHED]
    memory = group.memory_column
    scale, unit = group.memory_scale
    kind = memory.removeprefix("peak_").removesuffix("_gib")

    def draw(frame: Frame) -> None:
        speed = frame.axes(LEFT_IN, COLUMN_IN, 0.0, len(outcomes) * ROW_IN)
        _draw_column(speed, outcomes, beside, "throughput_samples_per_s", 1.0)
        speed.set_xlabel("throughput (samples/s)")
        speed.set_yticks(range(len(outcomes)), [outcome.variant for outcome in outcomes])
        size = frame.axes(LEFT_IN + COLUMN_IN + GAP_IN, COLUMN_IN, 0.0, len(outcomes) * ROW_IN)
        _draw_column(size, outcomes, beside, memory, scale)
        size.set_xlabel(f"peak {kind} ({unit})")
        size.set_yticks(range(len(outcomes)), [])

    page.strip(len(outcomes) * ROW_IN + AXIS_IN, draw)


def _draw_column(axes: Axes, outcomes: Sequence[Outcome], beside: Sequence[Group], column: str, scale: float) -> None:
    rule_lines(axes, len(outcomes))
    shown = {outcome.variant: y for y, outcome in enumerate(outcomes)}
    others = [
        (other.head.evidence, shown[variant], scale * value)
        for other in beside
        for variant, outcome in other.outcomes.items()
        if variant in shown
        for value in outcome.samples(column)
    ]
    own = [scale * value for outcome in outcomes for value in outcome.samples(column)]
    fit_limits(axes, [*own, *(value for _, _, value in others)])
    for kind, y, value in others:
        axes.plot(value, y + 0.14, linestyle="none", markerfacecolor="none", zorder=4, **_BESIDE[kind])
    base = outcomes[0].interval(column)
    for y, outcome in enumerate(outcomes):
        interval = outcome.interval(column)
        if interval is None:
            draw_absence(axes, y, outcome)
            continue
        mark = VARIANT_MARKS[outcome.variant]
        draw_interval(axes, interval, scale, y + 0.14, mark)
        if interval.n > 1:
            draw_samples(axes, outcome.samples(column), scale, y + 0.34, mark)
        ratio = f" ({interval.median / base.median:.2f}{TIMES})" if base and y and base.median else ""
        label(axes, scale * interval.median, y, significant(scale * interval.median) + ratio)


def rule_lines(axes: Axes, count: int) -> None:
    """Make room for some lines, with a rule between them."""
    axes.set_ylim(count - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    for y in range(1, count):
        axes.axhline(y - 0.5, linewidth=0.3, color=RULE, zorder=0)


def fit_limits(axes: Axes, values: Sequence[float]) -> None:
    """Show all of some values; no ticks where there are none."""
    if not values:
        axes.set(xlim=(0, 1), xticks=[])
        return
    margin = 0.08 * (max(values) - min(values)) or 0.1 * abs(max(values)) or 1.0
    axes.set_xlim(min(values) - margin, max(values) + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 2.5, 5, 10]))


def label(axes: Axes, value: float, y: int, text: str) -> None:
    """A value above its mark, moved inwards where it would leave the axes."""
    low, high = axes.get_xlim()
    half = (text_width_pt(text) / 2 + 2) / (COLUMN_IN * 72)
    place = min(max((value - low) / (high - low), half), 1 - half) if half < 0.5 else 0.5
    # In front of a white box, so that no line runs through the digits.
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
    axes.text(low + place * (high - low), y - 0.12, text, ha="center", va="bottom", fontsize=FONT_PT, bbox=box)


def draw_absence(axes: Axes, y: int, outcome: Outcome) -> None:
    """Say in its line why an outcome has no value."""
    statuses = dict.fromkeys(row.status for row in outcome.failed)
    if statuses:
        draw_failure(axes, 0.06, y, next(iter(statuses)), axes.get_yaxis_transform())
    text = ", ".join(statuses) or ("no value" if outcome.ok else "not run")
    axes.text(0.14, y, text, transform=axes.get_yaxis_transform(), va="center_baseline", color=FAINT, style="italic")
