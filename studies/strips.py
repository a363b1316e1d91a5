"""A figure of axes below each other, at places that follow from their sizes alone: the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpipe_bench.figures.style import EVIDENCE_COLOURS, FAINT, FONT_PT, WIDTH_IN, new_figure

LINE_IN = 0.12
"""Height of a line of text."""


class Strip(NamedTuple):
    """Axes across the page.

    Attributes:
        title: above them; empty for none.
        height_in: of the axes.
        left_in: room for the names on the left; ``right_in`` likewise.
        above_in: room between title and axes, for a legend or the titles of columns.
        below_in: room for ticks and the label.
        columns: axes beside each other.
    """

    title: str
    height_in: float
    left_in: float = 0.55
    right_in: float = 0.1
    above_in: float = 0.02
    below_in: float = 0.2
    columns: int = 1


def stacked(
    head: Sequence[str], evidence: str, strips: Sequence[Strip], notes: Sequence[str]
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a head, strips and notes; gives the axes of each strip, from left to right.

    Args:
        head: lines at the top, the first of them the title.
        evidence: kind of the numbers, which the title names in its colour.
        strips: from top to bottom.
        notes: lines at the end.
    """
    sizes = [bool(s.title) * 1.6 * LINE_IN + s.above_in + s.height_in + s.below_in for s in strips]
    height = LINE_IN * (len(head) + len(notes) + 1.5) + sum(sizes)
    figure = new_figure(height)

    def text(line: str, below_in: float, **style: Any) -> None:
        figure.text(0.06 / WIDTH_IN, 1 - below_in / height, line, va="top", fontsize=FONT_PT, **style)

    text(f"{evidence}: {head[0]}", 0.05, fontweight="bold", color=EVIDENCE_COLOURS[evidence])
    for number, line in enumerate(head[1:], start=1):
        text(line, 0.05 + LINE_IN * number, color=FAINT)
    top, made = LINE_IN * (len(head) + 1), list[list[Axes]]()
    for strip, size in zip(strips, sizes, strict=True):
        text(strip.title, top + 0.03, fontweight="bold")
        bottom = 1 - (top + size - strip.below_in) / height
        width = (WIDTH_IN - strip.left_in - strip.right_in + 0.1) / strip.columns
        lefts = (strip.left_in + k * width for k in range(strip.columns))
        rects = [(left / WIDTH_IN, bottom, (width - 0.1) / WIDTH_IN, strip.height_in / height) for left in lefts]
        made.append([figure.add_axes(rect) for rect in rects])
        top += size
    for number, line in enumerate(notes):
        text(line, top + 0.03 + LINE_IN * number, color=FAINT)
    return figure, made
