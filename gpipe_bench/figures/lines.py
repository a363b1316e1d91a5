"""Lines of values, one below the other: a mark per kind of evidence, and at the right how far two of them differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.style import EVIDENCE_COLOURS, FAINT, INK, RULE, WIDTH_IN

_LEFT_IN: Final = 0.98
_RIGHT_IN: Final = 0.55
_AXIS_IN: Final = 0.34
_MIDDLE: Final = 0.45
_MARKS: Final[dict[str, dict[str, Any]]] = {
    "published": {"marker": "d", "markersize": 6.5, "markerfacecolor": "none", "markeredgecolor": INK},
    "simulated": {"marker": "o", "markersize": 3.6, "color": EVIDENCE_COLOURS["simulated"]},
    # Often on the simulated one, so open and larger.
    "emulated": {
        "marker": "^",
        "markersize": 6.5,
        "markerfacecolor": "none",
        "markeredgecolor": EVIDENCE_COLOURS["emulated"],
    },
    "measured": {"marker": "s", "markersize": 3.6, "color": EVIDENCE_COLOURS["measured"]},
}


@dataclass(frozen=True, slots=True)
class Line:
    """One setting: its name, and for each kind of evidence its value or why there is none."""

    name: str
    known: dict[str, float]
    failures: dict[str, str]

    def ratio(self, of: str, over: str) -> str:
        """The value of one kind of evidence over that of another, minus 1; empty where one is unknown."""
        return f"{self.known[of] / self.known[over] - 1:+.1%}" if {of, over} <= set(self.known) else ""

    @property
    def failed(self) -> str:
        """The kinds of evidence that have no value, and why."""
        return ", ".join(f"{evidence}: {status}" for evidence, status in self.failures.items())


def add_lines(page: Page, lines: Sequence[Line], label: str, pair: tuple[str, str], height_in: float = 0.17) -> None:
    """Add lines to a page.

    Args:
        page: where to add them.
        lines: from top to bottom.
        label: of the axis of values.
        pair: the evidence whose values are compared, and that which they are compared with.
        height_in: of a line, in inches.
    """

    def draw(frame: Frame) -> None:
        axes = frame.axes(_LEFT_IN, WIDTH_IN - _LEFT_IN - _RIGHT_IN, 0.0, len(lines) * height_in)
        _draw(axes, lines, pair)
        axes.set_xlabel(label)

    page.strip(len(lines) * height_in + _AXIS_IN, draw)


def add_legend(page: Page, kinds: Sequence[str]) -> None:
    """Add the marks of some kinds of evidence to a page."""
    page.strip(0.15 if len(kinds) < len(_MARKS) else 0.28, partial(_draw_legend, kinds=kinds))


def _draw(axes: Axes, lines: Sequence[Line], pair: tuple[str, str]) -> None:
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_yticks(range(len(lines)), [line.name for line in lines])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.3, color=RULE)
    axes.set_axisbelow(True)
    axes.set_xlim(0, max((value for line in lines for value in line.known.values()), default=1.0) * 1.08)
    for y, line in enumerate(lines):
        for kind, value in line.known.items():
            axes.plot(value, y, linestyle="none", zorder=4 if kind in ("published", "emulated") else 3, **_MARKS[kind])
        _note(axes, y, line, pair)


def _note(axes: Axes, y: int, line: Line, pair: tuple[str, str]) -> None:
    """Write the ratio beside the axes, and on the emptier side of the marks which kinds failed."""
    place = axes.get_yaxis_transform()
    axes.text(1.02, y, line.ratio(*pair), transform=place, va="center_baseline")
    least = min(line.known.values(), default=axes.get_xlim()[1])
    x, side = (0.02, "left") if least > _MIDDLE * axes.get_xlim()[1] else (0.98, "right")
    axes.text(x, y, line.failed, transform=place, va="center_baseline", ha=side, color=FAINT, style="italic")


def _draw_legend(frame: Frame, kinds: Sequence[str]) -> None:
    handles = [Line2D([], [], linestyle="none", label=kind, **_MARKS[kind]) for kind in kinds]
    columns = 3 if len(kinds) < len(_MARKS) else 2
    frame.legend(handles, columns, handletextpad=0.3, columnspacing=1.0, labelspacing=0.2)
