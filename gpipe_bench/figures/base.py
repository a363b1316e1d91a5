"""What a figure is: a name, a caption, the tables that it is drawn from, and panels that each draw into axes.

Panels stand in rows from top to bottom; headings, notes and legends are panels, too. matplotlib's constrained layout
places them, and the figure becomes as high as its axes and their labels are together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.transforms import blended_transform_factory

from gpipe_bench.figures.style import BADGE_COLOURS, FAINT, FONT_PT, INK, TITLE_PT, drawing, save
from gpipe_bench.figures.text import text_width_pt, wrap

COLUMN_IN: Final = 3.4
"""Width of one column of a two-column paper."""

PAGE_IN: Final = 7.0
"""Width of both columns."""

_MARGIN_IN: Final = 0.06
_LEADING_IN: Final = FONT_PT * 1.25 / 72
_TITLE_IN: Final = TITLE_PT * 1.3 / 72
_TOP_IN: Final = 0.05
_BADGES_IN: Final = 0.17
_GUESS_IN: Final = 0.4
_APART_PT: Final = 4.0
"""Between a title and the badges beside it."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a table is drawn; an empty word leaves nothing out."""

    evidence: str = ""
    model: str = ""
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One axes of a figure: ``draw(axes, data)`` fills it, ``height_in`` is its height without labels."""

    draw: Callable[[Axes, Any], None]
    data: Any
    height_in: float


@dataclass(frozen=True, slots=True)
class Heading:
    """What the top of a figure, or of a part of it, says.

    Attributes:
        title: what the rows show, as a sentence.
        badges: the kinds of evidence; ``computed``: arithmetic from values of one of these kinds.
    """

    title: str
    badges: Sequence[str]


Rows = list[Sequence[Panel]]
"""Rows of panels, from top to bottom; the only panel of a row is as wide as the figure."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A kind of figure.

    Attributes:
        name: its name, as in ``gpipe-bench figure NAME``.
        caption: what it shows and how it is read, as plain text.
        sources: the tables that it is drawn from, by the ends of their names: ``""`` for rows, ``_events`` and so on.
        read: reads what it shows from a table of rows and the tables beside it.
        panels: the panels of that.
        width_in: how wide it is.
    """

    name: str
    caption: str
    sources: tuple[str, ...]
    read: Callable[[Path, Selection], Any]
    panels: Callable[[Any, float], Rows]
    width_in: float = COLUMN_IN

    def canvas(self, data: Any) -> Canvas:
        """The picture of some data, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
        return lay_out(self.panels(data, self.width_in), self.width_in)

    def draw(self, rows_csv: Path, out_stem: Path, selection: Selection = Selection()) -> list[Path]:
        """Draw the figure of a table.

        Args:
            rows_csv: the table of rows; other sources lie beside it.
            out_stem: path of the figure without its suffix.
            selection: what of the table is drawn.

        Returns:
            The paths written: SVG, PDF, PNG.

        Raises:
            ConfigError: a table cannot be read, or has nothing to draw; all such problems.
            OutputError: the figure cannot be written.
        """
        with drawing():
            rows = self.panels(self.read(rows_csv, selection), self.width_in)
            headings = [panel.data for row in rows for panel in row if isinstance(panel.data, Heading)]
            title = "; ".join(dict.fromkeys(one.title for one in headings))
            badges = list(dict.fromkeys(kind for one in headings for kind in one.badges))
            return save(lay_out(rows, self.width_in), out_stem, self.caption, title, badges)


def lay_out(rows: Rows, width_in: float) -> Canvas:
    """Draw panels into a picture, made without pyplot and so without a display or global state."""
    heights = [max(panel.height_in for panel in row) for row in rows]
    figure = Canvas(figsize=(width_in, sum(heights) + _GUESS_IN * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=_MARGIN_IN / 2, h_pad=0.012, wspace=0.0, hspace=0.0)
    columns = max(map(len, rows))
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
    shown = []
    for place, row in enumerate(rows):
        for column, panel in enumerate(row):
            axes = figure.add_subplot(grid[place, column] if len(row) > 1 else grid[place, :])
            panel.draw(axes, panel.data)
        shown.append(axes)
    # What labels need does not depend on the height: once it is known, the figure gets the height that it wants.
    engine.execute(figure)
    labels = figure.get_figheight() * (1 - sum(axes.get_position().height for axes in shown))
    figure.set_figheight(round(sum(heights) + labels, 3))
    engine.execute(figure)
    figure.set_layout_engine("none")
    for axes in figure.axes:
        # The solver of the layout differs in the last digits from run to run.
        left, bottom, width, height = (round(float(end), 4) for end in axes.get_position().bounds)
        axes.set_position((left, bottom, width, height))
    return figure


def heading(title: str, evidence: Sequence[str], setting: str, width_in: float) -> list[Panel]:
    """A title with a badge for each kind of evidence at the right of its first line, and the setting below.

    Badges that take more than a third of that line stand above it.
    """
    badges = sum(text_width_pt(kind, bold=True) + 9 for kind in evidence)
    width = (width_in - 2 * _MARGIN_IN) * 72
    above = badges > width / 3
    titles = wrap(title, width, TITLE_PT, bold=True, first_pt=None if above else width - badges - _APART_PT)
    lines = wrap(setting, width)
    top = _TOP_IN + (_BADGES_IN if above else 0.0)

    def draw(axes: Axes, _: Any) -> None:
        axes.set_axis_off()
        for k, line in enumerate(titles):
            _write(axes, top + k * _TITLE_IN, line, fontsize=TITLE_PT, fontweight="bold")
        for k, line in enumerate(lines):
            _write(axes, top + len(titles) * _TITLE_IN + k * _LEADING_IN, line, color=FAINT)
        right = width_in - _MARGIN_IN - 4 / 72
        for kind in reversed(evidence):
            _badge(axes, right, kind)
            right -= (text_width_pt(kind, bold=True) + 9) / 72

    height = top + len(titles) * _TITLE_IN + len(lines) * _LEADING_IN
    return [Panel(draw, Heading(title, evidence), height)]


def note(text: str, width_in: float, *, colour: str = FAINT, bold: bool = False) -> list[Panel]:
    """Running text, broken to the width of the figure."""
    lines = wrap(text, (width_in - 2 * _MARGIN_IN) * 72, bold=bold)

    def draw(axes: Axes, _: Any) -> None:
        axes.set_axis_off()
        for k, line in enumerate(lines):
            _write(axes, k * _LEADING_IN, line, color=colour, fontweight="bold" if bold else "normal")

    return [Panel(draw, None, len(lines) * _LEADING_IN)]


def legend(handles: Sequence[Any], columns: int) -> list[Panel]:
    """What the marks of the panels above mean."""

    def draw(axes: Axes, _: Any) -> None:
        axes.set_axis_off()
        across = blended_transform_factory(axes.figure.transSubfigure, axes.transAxes)
        found = axes.legend(
            handles=handles, loc="center", bbox_to_anchor=(0.5, 0.5), bbox_transform=across, ncols=columns,
            borderpad=0, columnspacing=1.2, handlelength=1.8, handletextpad=0.4, labelspacing=0.3,
        )  # fmt: skip
        found.set_in_layout(False)

    return [Panel(draw, None, 0.15 * -(-len(handles) // columns))]


def blank(height_in: float) -> Panel:
    """A panel with nothing in it, which keeps a place beside others."""
    return Panel(lambda axes, _: axes.set_axis_off(), None, height_in)


def across(rows: Iterable[Rows]) -> Rows:
    """Rows of several parts, one part below the other."""
    return [row for part in rows for row in part]


def _write(axes: Axes, top_in: float, text: str, **style: Any) -> None:
    """A line of text at the left edge of the figure, ``top_in`` inches below the top of the axes."""
    place = blended_transform_factory(axes.figure.dpi_scale_trans, axes.transAxes)
    axes.annotate(
        text, (_MARGIN_IN, 1), xycoords=place, xytext=(0, -72 * top_in), textcoords="offset points", va="top",
        ha="left", annotation_clip=False, in_layout=False, **style,
    )  # fmt: skip


def _badge(axes: Axes, right_in: float, evidence: str) -> None:
    colour = BADGE_COLOURS[evidence]
    # A dashed frame for what did not run here and now, so that the badge reads without its colour too.
    line = "solid" if evidence == "measured" else "dashed"
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour, "linewidth": 0.8, "linestyle": line}
    place = blended_transform_factory(axes.figure.dpi_scale_trans, axes.transAxes)
    axes.annotate(
        evidence, (right_in, 1), xycoords=place, xytext=(0, -72 * _TOP_IN), textcoords="offset points", va="top",
        ha="right", color=colour, fontweight="bold", bbox=box, annotation_clip=False, in_layout=False,
    )  # fmt: skip


__all__ = [
    "COLUMN_IN",
    "INK",
    "PAGE_IN",
    "Figure",
    "Heading",
    "Panel",
    "Rows",
    "Selection",
    "across",
    "blank",
    "heading",
    "lay_out",
    "legend",
    "note",
]  # fmt: skip
