"""Claims of the transparency experiment as strips: what training in micro-batches changes, with interval and margin.

Arms of which a claim is the same to the bit share a line: a pipeline computes the same in every checkpoint mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from matplotlib.ticker import MaxNLocator

from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.style import FONT_PT, INK, OKABE_ITO, WIDTH_IN
from gpipe_bench.results.tables import plain_records
from gpipe_bench.results.transparency_rows import arm_label

if TYPE_CHECKING:
    import pandas as pd

ARM_STYLES: Final = {
    "plain": (OKABE_ITO["black"], "-", "o"),
    "accumulated": (OKABE_ITO["orange"], "--", "^"),
    "always": (OKABE_ITO["vermilion"], "-", "v"),
    "except_last": (OKABE_ITO["purple"], "--", "s"),
    "never": (OKABE_ITO["sky"], ":", "D"),
    "deferred": (OKABE_ITO["blue"], "-", "o"),
}
"""Colour, line and marker of the arms that are told apart; each differs from the others in two of them."""

_NAMES: Final = {
    "loss_last_to_plain": "training loss of the last step",
    "accuracy_fraction": "accuracy, evaluation",
    "accuracy_batch_fraction": "accuracy, norms by held-out batch",
    "iou_fraction": "intersection over union",
}
_LEFT_IN: Final = 1.37
_RIGHT_IN: Final = 0.9
_ROW_IN: Final = 0.125

_VALUES: Final = ("estimate", "low", "high", "verdict")


def add_claims(page: Page, claims: pd.DataFrame) -> None:
    """Add a strip for each quantity in which arms are compared with the plain model."""
    present = [name for name in _NAMES if name in set(claims["quantity"])]
    if "iou_fraction" in present and "accuracy_batch_fraction" in present:
        present.remove("accuracy_batch_fraction")
    # One seed gives no interval: the estimate stands for both of its ends.
    ends = {end: claims[end].fillna(claims["estimate"]) for end in ("low", "high")}
    for name in present:
        own = claims.assign(**ends)[claims["quantity"] == name]
        _add_strip(page, f"Minus plain: {_NAMES[name]}", own)


def _add_strip(page: Page, title: str, claims: pd.DataFrame) -> None:
    lines = _lines(claims)
    height = _ROW_IN * len(lines) + 0.06

    def body(frame: Frame) -> None:
        frame.text(0.06, 0.02, title, fontweight="bold")
        axes = frame.axes(_LEFT_IN, WIDTH_IN - _LEFT_IN - _RIGHT_IN, 0.18, height)
        margin = claims["margin"].iloc[0]
        axes.axvspan(-margin, margin, color="#E8E8E8", linewidth=0)
        axes.axvline(0, color=INK, linewidth=0.4)
        for y, claim in enumerate(lines.values()):
            colour, _, marker = ARM_STYLES[_style(claim)]
            axes.plot([claim["low"], claim["high"]], [y, y], color=colour)
            axes.plot(claim["estimate"], y, marker, color=colour, markersize=3.2)
            axes.text(1.03, y, claim["verdict"], transform=axes.get_yaxis_transform(), va="center", fontsize=FONT_PT)
        axes.set_yticks(range(len(lines)), list(lines))
        axes.set_ylim(len(lines) - 0.5, -0.5)
        reach = max(margin, *claims[["low", "high"]].abs().max()) * 1.15
        axes.set_xlim(-reach, reach)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, symmetric=True))

    page.strip(0.18 + height + 0.2, body)


def _lines(claims: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """A claim per line by its label."""
    modes = len(claims["checkpoint"][claims["arm"] == "pipeline"].unique())
    both = bool(claims["deferred_batch_norm"].any())
    alike = claims.groupby(["arm", "deferred_batch_norm", *_VALUES], sort=False, dropna=False)
    return {_label(own, modes, both=both): plain_records(own.head(1))[0] for _, own in alike}


def _label(claims: pd.DataFrame, modes: int, *, both: bool) -> str:
    """The arm; a pipeline by its checkpoint modes unless they are all alike, and by deferral where some defer."""
    (head,) = plain_records(claims.head(1))
    if head["arm"] != "pipeline":
        return arm_label(head["arm"], "", "")
    kind = ", deferred" if head["deferred_batch_norm"] else ", not deferred" if both else ""
    return ("pipeline" if len(claims) == modes > 1 else ", ".join(claims["checkpoint"])) + kind


def _style(claim: Mapping[str, Any]) -> str:
    if claim["arm"] != "pipeline":
        return str(claim["arm"])
    return "deferred" if claim["deferred_batch_norm"] else str(claim["checkpoint"])
