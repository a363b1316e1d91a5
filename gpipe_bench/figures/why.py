"""Where device time goes: the device time of a sample, split into what it is spent on, with more devices or chunks.

A sample costs (devices) x (step time) / (batch size) of device time. With the same kernels, a balanced pipeline and
no bubble it would cost the same on any number of devices; what stacks up beyond that is why they do not scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gpipe_bench.figures.base import Figure, Panel, Rows, heading, legend, note
from gpipe_bench.figures.points import SHARES, Point, Series, points_of, series_of
from gpipe_bench.figures.style import FAINT, INK, OKABE_ITO, RULE
from gpipe_bench.figures.sweep import fitting, machine_words, read_sweep, sweep_groups
from gpipe_bench.figures.text import percent
from gpipe_bench.results.rows import Row

_HEIGHT_IN: Final = 0.68
_USUAL_CHUNKS: Final = 32
_USUAL_PARTITIONS: Final = 8
_IDEAL: Final[dict[str, Any]] = {"color": OKABE_ITO["vermilion"], "linewidth": 1.2}
_LOOK: Final[dict[str, dict[str, Any]]] = {
    "compute": {"facecolor": OKABE_ITO["sky"]},
    "recompute": {"facecolor": OKABE_ITO["yellow"], "hatch": "------"},
    "copy": {"facecolor": OKABE_ITO["purple"]},
    "imbalance": {"facecolor": "#F2F2F2", "hatch": ".."},
    "bubble": {"facecolor": "#B8B8B8"},
}


def _panels(rows: Sequence[Row], width_in: float) -> Rows:
    found: Rows = []
    drawn: list[tuple[str, str, list[Point]]] = []
    for group in sweep_groups(rows):
        head = group[0]
        shown = charts(fitting(series_of(points_of(group))))
        found.append(heading(_finding(head.model, shown), [head.evidence], machine_words(head), width_in))
        drawn += shown
        for title, axis, points in shown:
            found.append([Panel(partial(_draw, title=title, axis=axis), points, _HEIGHT_IN)])
    handles: list[Any] = [Patch(label=name, edgecolor=INK, linewidth=0.25, **_LOOK[name]) for name in SHARES]
    words = "Number: the share of idle time, bubble and imbalance."
    if any(point.throughput is None for *_, points in drawn for point in points):
        words += " A word instead of a bar says why there is none; oom: the step does not fit the memory."
    if any(point.ideal_ms is not None for *_, points in drawn for point in points):
        handles.append(Line2D([], [], label="with the ideal bubble alone", **_IDEAL))
    return [*found, legend(handles, 3), note(words, width_in)]


def _finding(model: str, shown: Sequence[tuple[str, str, Sequence[Point]]]) -> str:
    """How the idle share changes over the first chart."""
    if not shown:
        return f"{model}: where device time goes"
    _, axis, points = shown[0]
    known = [point for point in points if point.throughput is not None]
    ends = [percent(point.shares["bubble"] + point.shares["imbalance"]) for point in (known[0], known[-1])]
    counts = [point.n if axis == "partitions" else point.chunks for point in (known[0], known[-1])]
    one, many = ("partition", "partitions") if axis == "partitions" else ("micro-batch", "micro-batches")
    what = one if counts[0] == 1 else many
    return f"{model}: devices idle {ends[0]} of the time with {counts[0]} {what}, {ends[1]} with {counts[1]}"


def charts(series: Sequence[Series]) -> list[tuple[str, str, list[Point]]]:
    """(title, axis, points) of each chart, in the mode that most people use; those without any value are left out."""
    found: list[tuple[str, str, list[Point]]] = []
    for one in series:
        mode = "except_last" if "except_last" in one.points else next(iter(one.points))
        points = one.points[mode]
        chunks = _nearest({p.chunks for p in points}, _USUAL_CHUNKS)
        numbers = _nearest({p.n for p in points}, _USUAL_PARTITIONS)
        along_n = sorted((p for p in points if p.chunks == chunks), key=lambda p: p.n)
        along_m = sorted((p for p in points if p.n == numbers), key=lambda p: p.chunks)
        # With the micro-batch fixed too, more devices are the same chart twice.
        if one.fixed == "batch" or len(series) == 1:
            found.append((f"{chunks} chunks, {one.title}, {mode}", "partitions", along_n))
        found.append((f"{numbers} partitions, {one.title}, {mode}", "micro-batches (chunks)", along_m))
    return [chart for chart in found if sum(point.throughput is not None for point in chart[2]) > 1]


def _nearest(known: set[int], wanted: int) -> int:
    return min(known, key=lambda value: (abs(value - wanted), value))


def _draw(axes: Axes, points: Sequence[Point], title: str, axis: str) -> None:
    good = [max(point.device_ms, point.ideal_ms or 0.0) for point in points if point.throughput is not None]
    axes.set(xlim=(-0.6, len(points) - 0.4), ylim=(0, max(good) * 1.3))
    axes.set_title(title, loc="left", fontsize="medium", pad=2)
    axes.grid(axis="y", linewidth=0.3, color=RULE)
    axes.set_axisbelow(True)
    for x, point in enumerate(points):
        if point.throughput is None:
            axes.text(x, 0, point.row.status, ha="center", va="bottom", color=FAINT)
            continue
        bottom = 0.0
        for name in SHARES:
            height = point.shares[name] * point.device_ms
            axes.bar(x, height, 0.62, bottom, edgecolor=INK, linewidth=0.25 if height else 0, **_LOOK[name])
            bottom += height
        top = point.device_ms
        if point.ideal_ms is not None:
            axes.plot([x - 0.42, x + 0.42], [point.ideal_ms] * 2, zorder=4, **_IDEAL)
            top = max(top, point.ideal_ms)
        idle = point.shares["bubble"] + point.shares["imbalance"]
        axes.text(x, top + 0.05 * max(good), f"{idle:.0%}", ha="center", va="bottom")
    names = [str(point.n if axis == "partitions" else point.chunks) for point in points]
    axes.set_xticks(range(len(points)), names)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(axis)
    axes.set_ylabel("device time\nper sample (ms)")


WHY: Final = Figure(
    name="why",
    caption=(
        "Device time per sample (devices times step time over batch size), split into what it is spent on. The "
        "number above a bar is the share of idle time: bubble and imbalance. A line shows the same work with the "
        "ideal bubble alone."
    ),
    sources=("",),
    read=read_sweep,
    panels=_panels,
)
