"""The share of each component in speed and memory: Shapley values of a complete factorial.

A bar is what a component contributes on the mean over all orders in which the components can be added; the bars of a
panel add up to the whole gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.figures.base import Figure, Panel, Rows, across, heading, legend, note
from gpipe_bench.figures.groups import ordered_groups, setting_words
from gpipe_bench.figures.style import INK, OKABE_ITO, RULE
from gpipe_bench.figures.tables import read_beside
from gpipe_bench.figures.text import listing, significant
from gpipe_bench.results.outcomes import THROUGHPUT, Group, shown_groups
from gpipe_bench.results.rows import Row
from gpipe_bench.results.shapley import Share

_BASELINE: Final = "The variant baseline has clock cycle and early recompute on."
_DIAMOND: Final[dict[str, Any]] = {
    "marker": "D", "linestyle": "none", "markersize": 3.4, "markeredgecolor": INK, "markeredgewidth": 0.5,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Quantity:
    """One column: the shares of the components, and what each brought when added in the published order."""

    name: str
    unit: str
    colour: str
    shares: dict[str, Share]
    steps: dict[str, dict[str, float]]
    total: str


def _panels(rows: Sequence[Row], width_in: float) -> Rows:
    groups = ordered_groups(rows)
    complete = [(group, beside) for group, beside in shown_groups(groups) if group.shares(THROUGHPUT)]
    if not complete:
        words = "No shares: they need a value of every combination of the components, and some have none."
        return [heading("Components: no shares", [groups[-1].head.evidence], "", width_in), note(words, width_in)]
    return across(_group(group, beside, width_in) for group, beside in complete)


def _group(group: Group, beside: Sequence[Group], width_in: float) -> Rows:
    published = [other for other in beside if other.head.evidence == "published"]
    kinds = [*(other.head.evidence for other in published), group.head.evidence]
    scale, unit = group.memory_scale
    found = [
        _quantity([*published, group], THROUGHPUT, 1.0, ("throughput", "samples/s", OKABE_ITO["sky"])),
        _quantity([*published, group], group.memory_column, scale, ("memory", unit, OKABE_ITO["orange"])),
    ]
    shown = [quantity for quantity in found if quantity]
    height = 0.25 * len(group.switched)
    names = [name.replace("_", " ") for name in group.switched]
    handles: list[Patch | Line2D] = [
        Patch(facecolor=shown[0].colour, label="Shapley value (number): mean over all orders"),
        Line2D([], [], color=INK, linewidth=0.7, label="least to most of any order"),
        *(Line2D([], [], color=_fill(kind), label=f"added in published order, {kind}", **_DIAMOND) for kind in kinds),
    ]
    return [
        heading(_finding(group.head.model, shown[0]), kinds, setting_words(group.head), width_in),
        [Panel(partial(_draw, names=names if k == 0 else []), one, height) for k, one in enumerate(shown)],
        legend(handles, 1),
        note(f"All off to all on: {'; '.join(one.total for one in shown)}. {_BASELINE}", width_in),
    ]


def _finding(model: str, speed: _Quantity) -> str:
    """Which component brings most of the gain, and which brings none."""
    values = {name.replace("_", " "): share.value for name, share in speed.shares.items()}
    best = max(values, key=lambda name: values[name])
    words = f"{model}: of {sum(values.values()):.1f}\u00a0{speed.unit} that the components gain, {best}"
    lost = [name for name, value in values.items() if value < -0.05]
    costs = (
        f"; {listing(lost)} {'take' if len(lost) > 1 or lost[0].endswith('s') else 'takes'} some away" if lost else ""
    )
    return f"{words} {'bring' if best.endswith('s') else 'brings'} {values[best]:.1f}{costs}"


def _fill(kind: str) -> str:
    return INK if kind == "published" else "white"


def _quantity(groups: Sequence[Group], column: str, scale: float, words: tuple[str, str, str]) -> _Quantity | None:
    """The shares in one column of the last group; None where a combination has no value of it."""
    group = groups[-1]
    shares = group.shares(column, scale)
    if not shares:
        return None
    ends = (group.outcomes[Components(**dict.fromkeys(shares, on)).label] for on in (False, True))
    low, high = (significant(scale * (end.middle(column) or 0.0)) for end in ends)
    steps = {one.head.evidence: _steps(one, column, scale) for one in reversed(groups)}
    return _Quantity(*words, shares, steps, f"{words[0]} {low} to {high}\u00a0{words[1]}")


def _steps(group: Group, column: str, scale: float) -> dict[str, float]:
    """What each component brings in the published order: the step from one published variant to the next."""
    found: dict[str, float] = {}
    for before, after in pairwise(PUBLISHED):
        ends = [group.outcomes[label].middle(column) for label in (before, after) if label in group.outcomes]
        old, new = Components.from_label(before), Components.from_label(after)
        (name,) = (name for name in Components.switched() if getattr(old, name) != getattr(new, name))
        known = [end for end in ends if end is not None]
        if len(known) == 2:
            found[name] = scale * (known[1] - known[0])
    return found


def _draw(axes: Axes, quantity: _Quantity, names: Sequence[str]) -> None:
    axes.set_ylim(len(quantity.shares) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.3, color=RULE)
    axes.set_axisbelow(True)
    axes.axvline(0, color=INK, linewidth=0.5, zorder=2)
    for y, (name, share) in enumerate(quantity.shares.items()):
        axes.barh(y + 0.12, share.value, height=0.36, color=quantity.colour, zorder=1.5)
        axes.plot([share.low, share.high], [y + 0.12] * 2, color=INK, linewidth=0.7, zorder=2.5)
        for kind, values in quantity.steps.items():
            if name in values:
                axes.plot(values[name], y + 0.12, zorder=3, color=_fill(kind), **_DIAMOND)
        text = f"{share.value:+.1f}".replace("-", "\N{MINUS SIGN}")
        axes.text(1, y - 0.14, text, transform=axes.get_yaxis_transform(), ha="right", va="bottom")
    axes.margins(x=0.08)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel(f"{quantity.name} ({quantity.unit})")
    axes.set_yticks(range(len(quantity.shares)), names or [""] * len(quantity.shares))


SHARES: Final = Figure(
    name="shares",
    caption=(
        "Share of each component in throughput and memory: its Shapley value, the mean over all orders in which the "
        "components can be added. Lines span what it changes in any one combination."
    ),
    sources=("",),
    read=read_beside,
    panels=_panels,
)
