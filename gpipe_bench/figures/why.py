"""Why is it slower with more devices or more chunks? The device time of a sample, split into what it is spent on.

A sample costs (partitions) x (step time) / (batch size) of device time. With the same kernels, a balanced pipeline and
no bubble it would cost the same on any number of devices; what stacks up beyond that is why they do not scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gpipe_bench.figures.boxes import Box, add_boxes
from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.points import SHARES, Point, Series, points_of, series_of
from gpipe_bench.figures.style import FAINT, INK, OKABE_ITO, RULE, WIDTH_IN
from gpipe_bench.figures.sweep import machine_words, sweep_groups
from gpipe_bench.figures.text import TIMES, significant
from gpipe_bench.results.rows import Row

_LEFT_IN: Final = 0.60
_RIGHT_IN: Final = 0.08
_HEIGHT_IN: Final = 1.05
_AXIS_IN: Final = 0.34
_TOP_IN: Final = 0.16
_USUAL_CHUNKS: Final = 32
_USUAL_PARTITIONS: Final = 8
_LOOK: Final[dict[str, dict[str, Any]]] = {
    "compute": {"facecolor": OKABE_ITO["sky"]},
    "recompute": {"facecolor": OKABE_ITO["yellow"], "hatch": "------"},
    "copy": {"facecolor": OKABE_ITO["purple"]},
    "imbalance": {"facecolor": "#F2F2F2", "hatch": "....."},
    "bubble": {"facecolor": "#B8B8B8"},
}


def why_figure(rows: Sequence[Row]) -> Figure:
    """The figure of some rows, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page()
    # Of a sweep a few cells are emulated: no line along an axis.
    for k, group in enumerate(group for group in sweep_groups(rows) if group[0].evidence != "emulated"):
        if k:
            page.space(0.16)
        head = group[0]
        page.heading(f"{head.model}: why is it slower?", head.evidence)
        page.paragraph(machine_words(head), colour=FAINT)
        for title, names, points in _panels(series_of(points_of(group))):
            page.space(0.07)
            page.paragraph(title, bold=True)
            page.strip(_TOP_IN + _HEIGHT_IN + _AXIS_IN, partial(_draw, names=names, points=points))
            page.paragraph(explanation(names, points), colour=FAINT)
    page.space(0.05)
    page.strip(0.30, _draw_legend)
    page.space(0.03)
    page.paragraph(
        "Number above a bar: share of idle time, that is bubble and imbalance. A line above its bar: recomputation ran "
        "in the bubble.",
        colour=FAINT,
    )
    return page.render()


Panel = tuple[str, tuple[str, str], list[Point]]


def _panels(series: Sequence[Series]) -> list[Panel]:
    """(title, (axis, unit of a step along it), points) of each panel, in the mode that most people use."""
    panels: list[Panel] = []
    for one in series:
        mode = "except_last" if "except_last" in one.points else next(iter(one.points))
        points = one.points[mode]
        chunks = _nearest({p.chunks for p in points}, _USUAL_CHUNKS)
        numbers = _nearest({p.n for p in points}, _USUAL_PARTITIONS)
        along_n = sorted((p for p in points if p.chunks == chunks), key=lambda p: p.n)
        along_m = sorted((p for p in points if p.n == numbers), key=lambda p: p.chunks)
        head = f"{one.title}, checkpoint {mode}"
        # With the micro-batch fixed too, more devices are the same panel twice.
        if one.fixed == "batch" or len(series) == 1:
            panels.append((f"More devices: {chunks} chunks, {head}", ("partitions", "n"), along_n))
        panels.append((f"More chunks: {numbers} partitions, {head}", ("micro-batches (chunks)", "chunks"), along_m))
    return [panel for panel in panels if len(panel[2]) > 1]


def _nearest(known: set[int], wanted: int) -> int:
    return min(known, key=lambda value: (abs(value - wanted), value))


def explanation(names: tuple[str, str], points: Sequence[Point]) -> str:
    """What makes the cost of a sample grow from its cheapest point to the last one, in a sentence."""
    good = [point for point in points if point.throughput is not None]
    if not good:
        return "Nothing fits the memory."
    last, cheapest = good[-1], min(good, key=lambda point: point.device_ms)
    if cheapest is last:
        first = good[0]
        if first is last:
            return "One value alone."
        gone = {name: first.device_ms * first.shares[name] - last.device_ms * last.shares[name] for name in SHARES}
        verb, ends, changes = "falls", (first, last), gone
    else:
        grown = {
            name: last.device_ms * last.shares[name] - cheapest.device_ms * cheapest.shares[name] for name in SHARES
        }
        verb, ends, changes = "rises", (cheapest, last), grown
    return _sentence(names[1], verb, ends, changes)


def _sentence(key: str, verb: str, ends: tuple[Point, Point], changes: dict[str, float]) -> str:
    before, after = ends
    total = sum(value for value in changes.values() if value > 0)
    ranked = sorted(changes.items(), key=lambda item: -item[1])
    parts = [f"{name} {value / total:.0%}" for name, value in ranked if total and value > 0.02 * total]
    x = [point.n if key == "n" else point.chunks for point in ends]
    ratio = max(after.device_ms, before.device_ms) / max(min(after.device_ms, before.device_ms), 1e-12)
    return (
        f"From {x[0]} to {x[1]} the cost of a sample {verb} {ratio:.2f}{TIMES}"
        f" ({significant(before.device_ms)} to {significant(after.device_ms)} ms): {', '.join(parts)}."
    )


def _draw(frame: Frame, names: tuple[str, str], points: Sequence[Point]) -> None:
    axes = frame.axes(_LEFT_IN, WIDTH_IN - _LEFT_IN - _RIGHT_IN, _TOP_IN, _HEIGHT_IN)
    axis, key = names
    good = [max(point.device_ms, point.ideal_ms) for point in points if point.throughput is not None]
    top = max(good, default=1.0) * 1.02
    axes.set(xlim=(-0.6, len(points) - 0.4), ylim=(0, top))
    axes.grid(axis="y", linewidth=0.3, color=RULE)
    axes.set_axisbelow(True)
    parts: dict[str, list[Box]] = {name: [] for name in SHARES}
    for x, point in enumerate(points):
        _draw_marks(axes, x, point, top)
        bottom = 0.0
        for name in SHARES:
            height = point.shares[name] * point.device_ms
            parts[name] += [(x - 0.31, bottom, 0.62, height)] if height else []
            bottom += height
    for name, boxes in parts.items():
        add_boxes(axes, boxes, edgecolor=INK, linewidth=0.25, **_LOOK[name])
    axes.set_xticks(range(len(points)), [str(point.n if key == "n" else point.chunks) for point in points])
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(axis)
    axes.set_ylabel("device time\nper sample (ms)")


def _draw_marks(axes: Axes, x: int, point: Point, top: float) -> None:
    if point.throughput is None:
        axes.text(x, top * 0.03, point.row.status, ha="center", va="bottom", rotation=90, color=FAINT)
        return
    axes.plot([x - 0.42, x + 0.42], [point.ideal_ms] * 2, color=OKABE_ITO["vermilion"], linewidth=1.2, zorder=4)
    idle = point.shares["bubble"] + point.shares["imbalance"]
    axes.text(x, max(point.device_ms, point.ideal_ms) + top * 0.02, f"{idle:.0%}", ha="center", va="bottom")


def _draw_legend(frame: Frame) -> None:
    handles: list[Any] = [Patch(label=name, edgecolor=INK, linewidth=0.25, **_LOOK[name]) for name in SHARES]
    handles.append(Line2D([], [], color=OKABE_ITO["vermilion"], linewidth=1.2, label="with the ideal bubble alone"))
    frame.legend(handles, 3, handlelength=1.6, columnspacing=1.0, handletextpad=0.4, labelspacing=0.3)
