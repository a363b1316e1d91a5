"""A figure as strips stacked from top to bottom, each of a known height, so that nothing overlaps or is clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpipe_bench.figures.style import EVIDENCE_COLOURS, FONT_PT, INK, TITLE_PT, WIDTH_IN, new_figure
from gpipe_bench.figures.text import text_width_pt, wrap

_MARGIN_IN = 0.06
_LEADING = 1.25
_BADGE_IN = FONT_PT / 72 + 0.08


@dataclass(frozen=True, slots=True)
class Frame:
    """One strip of a figure: its place in inches, measured from the top left corner."""

    figure: Figure
    top_in: float
    height_in: float

    def axes(self, left_in: float, width_in: float, top_in: float = 0.0, height_in: float | None = None) -> Axes:
        """Axes in this strip; ``top_in`` counts from the strip's top, the height reaches its end unless given."""
        wide, total = self.figure.get_size_inches()
        height = self.height_in - top_in if height_in is None else height_in
        bottom = total - self.top_in - top_in - height
        return self.figure.add_axes((left_in / wide, bottom / total, width_in / wide, height / total))

    def legend(self, handles: Sequence[Any], columns: int, **spacing: Any) -> None:
        """A legend in the middle of this strip."""
        axes = self.axes(0.0, self.figure.get_figwidth())
        axes.set_axis_off()
        axes.legend(handles=handles, loc="center", ncols=columns, borderpad=0, **spacing)

    def text(self, x_in: float, y_in: float, text: str, **style: Any) -> None:
        """Text whose top left corner lies at ``(x_in, y_in)`` of this strip, unless ``style`` says otherwise."""
        y = 1 - (self.top_in + y_in) / self.figure.get_figheight()
        self.figure.text(x_in / self.figure.get_figwidth(), y, text, **{"va": "top", "ha": "left", **style})


class Page:
    """Strips, added from top to bottom and drawn once the height of all of them is known.

    Args:
        width_in: of the figure: one column of a paper, or both.
    """

    def __init__(self, width_in: float = WIDTH_IN) -> None:
        self.width_in = width_in
        self._strips: list[tuple[float, Callable[[Frame], None]]] = []

    def strip(self, height_in: float, draw: Callable[[Frame], None]) -> None:
        """Add a strip; ``draw`` gets its frame."""
        self._strips.append((height_in, draw))

    def space(self, height_in: float) -> None:
        """Leave ``height_in`` inches free."""
        self.strip(height_in, lambda _: None)

    def paragraph(self, text: str, *, colour: str = INK, left_in: float = _MARGIN_IN, bold: bool = False) -> None:
        """Add running text, broken to the width of the column."""
        lines = wrap(text, (self.width_in - left_in - _MARGIN_IN) * 72, bold=bold)
        leading = FONT_PT * _LEADING / 72

        def draw(frame: Frame) -> None:
            for k, line in enumerate(lines):
                frame.text(left_in, k * leading, line, color=colour, fontweight="bold" if bold else "normal")

        self.strip(len(lines) * leading, draw)

    def heading(self, title: str, *evidence: str) -> None:
        """Add a title, at its right a badge for each kind of evidence that is shown, one below the other."""
        badge_in = (max(text_width_pt(kind, FONT_PT, bold=True) for kind in evidence) + 8) / 72
        lines = wrap(title, (self.width_in - 2 * _MARGIN_IN - badge_in - 0.06) * 72, TITLE_PT, bold=True)
        leading = TITLE_PT * _LEADING / 72

        def draw(frame: Frame) -> None:
            for k, line in enumerate(lines):
                frame.text(_MARGIN_IN, 0.03 + k * leading, line, fontsize=TITLE_PT, fontweight="bold")
            for k, kind in enumerate(evidence):
                _draw_badge(frame, kind, 0.05 + k * _BADGE_IN)

        self.strip(max(len(lines) * leading, len(evidence) * _BADGE_IN) + 0.05, draw)

    def render(self) -> Figure:
        """Draw all strips into a figure as high as they are together."""
        height = sum(height for height, _ in self._strips) + 2 * _MARGIN_IN
        figure = new_figure(height, self.width_in)
        top = _MARGIN_IN
        for height_in, draw in self._strips:
            draw(Frame(figure, top, height_in))
            top += height_in
        return figure


def _draw_badge(frame: Frame, evidence: str, top_in: float) -> None:
    colour = EVIDENCE_COLOURS[evidence]
    # A dashed frame for what did not run here and now, so that the badge reads without its colour too.
    line = "solid" if evidence == "measured" else "dashed"
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour, "linewidth": 0.8, "linestyle": line}
    frame.text(
        frame.figure.get_figwidth() - _MARGIN_IN - 3 / 72,
        top_in,
        evidence,
        ha="right",
        color=colour,
        fontweight="bold",
        bbox=box,
    )
