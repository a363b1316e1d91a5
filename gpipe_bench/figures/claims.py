"""Claims of the transparency experiment as strips: what training in micro-batches changes, with interval and margin.

Arms of which a claim is the same to the bit share a line: a pipeline computes the same in every checkpoint mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from matplotlib.ticker import MaxNLocator

from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.style import FONT_PT, INK, OKABE_ITO, WIDTH_IN
from gpipe_bench.transparency_rows import arm_label

__all__ = ["ARM_STYLES", "add_claims"]

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

Record = Mapping[str, str]


def add_claims(page: Page, claims: Sequence[Record]) -> None:
    """Add a strip for each quantity in which arms are compared with the plain model."""
    present = [name for name in _NAMES if any(claim["quantity"] == name for claim in claims)]
    if "iou_fraction" in present and "accuracy_batch_fraction" in present:
        present.remove("accuracy_batch_fraction")
    for name in present:
        _add_strip(page, f"Minus plain: {_NAMES[name]}", [claim for claim in claims if claim["quantity"] == name])


def _add_strip(page: Page, title: str, records: Sequence[Record]) -> None:
    lines = _lines(records)
    height = _ROW_IN * len(lines) + 0.06

    def body(frame: Frame) -> None:
        frame.text(0.06, 0.02, title, fontweight="bold")
        axes = frame.axes(_LEFT_IN, WIDTH_IN - _LEFT_IN - _RIGHT_IN, 0.18, height)
        margin = float(records[0]["margin"])
        axes.axvspan(-margin, margin, color="#E8E8E8", linewidth=0)
        axes.axvline(0, color=INK, linewidth=0.4)
        for y, record in enumerate(lines.values()):
            colour, _, marker = ARM_STYLES[_style(record)]
            axes.plot([_end(record, "low"), _end(record, "high")], [y, y], color=colour)
            axes.plot(float(record["estimate"]), y, marker, color=colour, markersize=3.2)
            axes.text(1.03, y, record["verdict"], transform=axes.get_yaxis_transform(), va="center", fontsize=FONT_PT)
        axes.set_yticks(range(len(lines)), list(lines))
        axes.set_ylim(len(lines) - 0.5, -0.5)
        reach = max([margin, *(abs(_end(record, end)) for record in records for end in ("low", "high"))]) * 1.15
        axes.set_xlim(-reach, reach)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, symmetric=True))

    page.strip(0.18 + height + 0.2, body)


def _lines(records: Sequence[Record]) -> dict[str, Record]:
    """A record per line by its label."""
    alike: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        key = [record[name] for name in ("arm", "deferred_batch_norm", "estimate", "low", "high", "verdict")]
        alike.setdefault(tuple(key), []).append(record)
    modes = {record["checkpoint"] for record in records if record["arm"] == "pipeline"}
    both = any(record["deferred_batch_norm"] == "True" for record in records)
    return {_label(members, len(modes), both=both): members[0] for members in alike.values()}


def _label(members: Sequence[Record], modes: int, *, both: bool) -> str:
    """The arm; a pipeline by its checkpoint modes unless they are all alike, and by deferral where some defer."""
    head = members[0]
    if head["arm"] != "pipeline":
        return arm_label(head["arm"], "", "")
    deferred = head["deferred_batch_norm"] == "True"
    kind = ", deferred" if deferred else ", not deferred" if both else ""
    return ("pipeline" if len(members) == modes > 1 else ", ".join(r["checkpoint"] for r in members)) + kind


def _style(record: Record) -> str:
    if record["arm"] != "pipeline":
        return record["arm"]
    return "deferred" if record["deferred_batch_norm"] == "True" else record["checkpoint"]


def _end(record: Record, name: str) -> float:
    """An end of the interval; the estimate where one seed gives none."""
    return float(record[name] or record["estimate"])
