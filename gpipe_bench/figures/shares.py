"""The share of each component in speed and memory as a figure: Shapley values of a complete factorial.

One block per group of comparable rows in which every combination has a value. A bar is what a component contributes on
the mean over all orders in which the components can be added; the bars of a panel add up to the whole gain. The line
through it spans what it brings to any single combination, and diamonds show its share in the one order of print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.figures.groups import ordered_groups, setting_words
from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.style import FAINT, INK, LEFT_IN, OKABE_ITO, RIGHT_IN, RULE, WIDTH_IN
from gpipe_bench.figures.text import significant
from gpipe_bench.results.outcomes import Group, shown_groups
from gpipe_bench.results.rows import Row
from gpipe_bench.results.shapley import Share

_COMPONENTS: Final = Components.__slots__
_ROW_IN: Final = 0.27
_AXIS_IN: Final = 0.34
_GAP_IN: Final = 0.14
_SPEED: Final = "throughput_samples_per_s"
_PRINTED: Final = OKABE_ITO["black"]
_SIMULATED: Final = "white"


@dataclass(frozen=True, slots=True)
class _Quantity:
    """A column of the rows, with the factor to its unit and the colour of its bars."""

    column: str
    scale: float
    name: str
    unit: str
    colour: str


@dataclass(frozen=True, slots=True)
class _Panel:
    """One quantity: shares of the components, steps in the order of print, and the change from all off to all on."""

    quantity: _Quantity
    shares: dict[str, Share]
    printed: dict[str, float]
    stepwise: dict[str, float]
    total: str


def shares_figure(rows: Sequence[Row]) -> Figure:
    """The figure of some rows, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page()
    groups = ordered_groups(rows)
    complete = [(group, beside) for group, beside in shown_groups(groups) if group.shares(_SPEED)]
    for k, (group, beside) in enumerate(complete):
        if k:
            page.space(0.16)
        _add_group(page, group, next((other for other in beside if other.head.evidence == "published"), None))
    if not complete:
        page.heading("Shares of the components", groups[-1].head.evidence)
        page.paragraph("No shares: they need a value of every combination of the components, and some have none.")
    return page.render()


def _add_group(page: Page, group: Group, published: Group | None) -> None:
    beside = ["published"] if published else []
    page.heading(f"{group.head.model}: share of each component", *beside, group.head.evidence)
    page.paragraph(setting_words(group.head), colour=FAINT)
    page.space(0.06)
    scale, unit = group.memory_scale
    quantities = (
        _Quantity(_SPEED, 1.0, "throughput", "samples/s", OKABE_ITO["sky"]),
        _Quantity(group.memory_column, scale, "memory", unit, OKABE_ITO["orange"]),
    )
    panels = [panel for panel in (_panel(group, published, quantity) for quantity in quantities) if panel]
    width = (WIDTH_IN - LEFT_IN - _GAP_IN - RIGHT_IN) / 2

    def draw(frame: Frame) -> None:
        for k, panel in enumerate(panels):
            axes = frame.axes(LEFT_IN + k * (width + _GAP_IN), width, 0.0, len(_COMPONENTS) * _ROW_IN)
            _draw(axes, panel)
            names = [name.replace("_", " ") for name in _COMPONENTS] if k == 0 else []
            axes.set_yticks(range(len(_COMPONENTS)), names)

    page.strip(len(_COMPONENTS) * _ROW_IN + _AXIS_IN, draw)
    page.strip(0.32, lambda frame: _draw_legend(frame, panels, group.head.evidence))
    page.space(0.03)
    totals = "; ".join(panel.total for panel in panels)
    page.paragraph(f"The shares of a panel add up to the change from all off to all on: {totals}.", colour=FAINT)


def _panel(group: Group, published: Group | None, quantity: _Quantity) -> _Panel | None:
    """The shares in one column; None where a combination has no value of it."""
    shares = group.shares(quantity.column, quantity.scale)
    if not shares:
        return None
    ends = (group.outcomes[Components(*[on] * len(_COMPONENTS)).label] for on in (False, True))
    low, high = (significant(quantity.scale * (end.middle(quantity.column) or 0.0)) for end in ends)
    return _Panel(
        quantity,
        shares,
        _stepwise(published, quantity) if published else {},
        _stepwise(group, quantity),
        f"{quantity.name} {low} to {high}\u00a0{quantity.unit}",
    )


def _stepwise(group: Group, quantity: _Quantity) -> dict[str, float]:
    """What each component brings in the order of print: the step from one published variant to the next."""
    found: dict[str, float] = {}
    for before, after in pairwise(PUBLISHED):
        ends = [group.outcomes[label].interval(quantity.column) for label in (before, after) if label in group.outcomes]
        old, new = Components.from_label(before), Components.from_label(after)
        (name,) = (name for name in _COMPONENTS if getattr(old, name) != getattr(new, name))
        known = [interval.median for interval in ends if interval]
        if len(known) == 2:
            found[name] = quantity.scale * (known[1] - known[0])
    return found


def _draw(axes: Axes, panel: _Panel) -> None:
    axes.set_ylim(len(_COMPONENTS) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.3, color=RULE)
    axes.set_axisbelow(True)
    axes.axvline(0, color=INK, linewidth=0.5, zorder=2)
    for y, name in enumerate(_COMPONENTS):
        share = panel.shares[name]
        axes.barh(y + 0.12, share.value, height=0.36, color=panel.quantity.colour, zorder=1.5)
        axes.plot([share.low, share.high], [y + 0.12] * 2, color=INK, linewidth=0.7, zorder=2.5)
        for values, fill in ((panel.stepwise, _SIMULATED), (panel.printed, _PRINTED)):
            if name in values:
                style: dict[str, Any] = {
                    "color": fill,
                    "markeredgecolor": _PRINTED,
                    "markeredgewidth": 0.5,
                    "markersize": 3.4,
                }
                axes.plot(values[name], y + 0.12, "D", zorder=3, **style)
    low, high = axes.get_xlim()
    for y, name in enumerate(_COMPONENTS):
        text = f"{panel.shares[name].value:+.1f}".replace("-", "\N{MINUS SIGN}")
        axes.text(high, y - 0.16, text, ha="right", va="bottom", color=INK)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel(f"{panel.quantity.name} ({panel.quantity.unit})")


def _draw_legend(frame: Frame, panels: Sequence[_Panel], evidence: str) -> None:
    handles: list[Patch | Line2D] = [Patch(facecolor=panels[0].quantity.colour, label="Shapley value (number)")]
    handles.append(Line2D([], [], color=INK, linewidth=0.7, label="least to most"))
    diamond: dict[str, Any] = {"marker": "D", "linestyle": "none", "markersize": 3.4, "markeredgecolor": _PRINTED}
    handles.append(Line2D([], [], markerfacecolor=_SIMULATED, label=f"order of print, {evidence}", **diamond))
    if any(panel.printed for panel in panels):
        handles.append(Line2D([], [], markerfacecolor=_PRINTED, label="order of print, published", **diamond))
    frame.legend(handles, 2, handlelength=1.4, columnspacing=1.0, handletextpad=0.4, labelspacing=0.3)
