"""The best chunks and balance for a model on a profile: all that were tried, and what each choice costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.points import Point, points_of
from gpipe_bench.figures.style import FAINT, INK, OKABE_ITO, RULE, WIDTH_IN
from gpipe_bench.figures.sweep import machine_words
from gpipe_bench.figures.text import listing, significant
from gpipe_bench.results.rows import Row
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES

_LEFT_IN: Final = 0.50
_RIGHT_IN: Final = 0.08
_HEIGHT_IN: Final = 0.95
_AXIS_IN: Final = 0.34
_TOP_IN: Final = 0.18
_ROW_IN: Final = 0.15
_MOST_BALANCES: Final = 8
_STYLES: Final[dict[str, dict[str, Any]]] = {
    "always": {"color": OKABE_ITO["vermilion"], "linestyle": "-", "marker": "v"},
    "except_last": {"color": OKABE_ITO["blue"], "linestyle": "--", "marker": "s"},
    "never": {"color": OKABE_ITO["green"], "linestyle": ":", "marker": "D"},
}


def advice_figure(rows: Sequence[Row]) -> Figure:
    """The figure of some rows, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page, points = Page(), points_of(rows)
    head, good = rows[0], [point for point in points if point.throughput]
    page.heading(f"{head.model}: best chunks and balance", head.evidence)
    page.paragraph(f"{machine_words(head)}; batch of {head.batch_size}", colour=FAINT)
    if not good:
        page.paragraph("Nothing that was tried fits the memory.")
        return page.render()
    best = max(good, key=lambda point: point.throughput or 0.0)
    page.space(0.05)
    page.paragraph(_words(best), bold=True)
    _add_lines(page, f"Chunks, on {best.n} devices", [p for p in points if p.n == best.n], "chunks", best)
    _add_lines(page, "Devices, each with its best chunks", _best_of(points), "n", best)
    same = [p for p in good if (p.n, p.chunks, p.row.checkpoint) == (best.n, best.chunks, best.row.checkpoint)]
    if len(same) > 1:
        _add_balances(page, same, best)
    failed = sorted({p.row.checkpoint for p in points if p.throughput is None})
    ending = f" Points that are missing did not fit the memory (checkpoint {listing(failed)})." if failed else ""
    page.paragraph(f"Circle: the recommended one.{ending}", colour=FAINT)
    return page.render()


def _words(best: Point) -> str:
    balance = best.row.balance
    cut = balance if len(balance) <= 40 else f"{balance[:38]}…"
    return (
        f"Recommended: {best.n} devices, {best.chunks} chunks, checkpoint {best.row.checkpoint}, balance {cut}: "
        f"{significant(best.throughput or 0.0)} samples/s"
    )


def _best_of(points: Sequence[Point]) -> list[Point]:
    """The fastest of each number of devices and mode."""
    found: dict[tuple[int, str], Point] = {}
    for point in points:
        key = point.n, point.row.checkpoint
        if key not in found or (point.throughput or 0.0) > (found[key].throughput or 0.0):
            found[key] = point
    return list(found.values())


def _add_lines(page: Page, title: str, points: Sequence[Point], key: str, best: Point) -> None:
    def draw(frame: Frame) -> None:
        frame.text(0.06, 0.03, title, fontweight="bold")
        axes = frame.axes(_LEFT_IN, WIDTH_IN - _LEFT_IN - _RIGHT_IN, _TOP_IN + 0.12, _HEIGHT_IN)
        places = sorted({_place(point, key) for point in points})
        for mode in CHECKPOINT_MODES:
            _draw_line(axes, [p for p in points if p.row.checkpoint == mode], mode, (key, places))
        axes.plot(places.index(_place(best, key)), best.throughput or 0.0, "o", markersize=9, markerfacecolor="none",
                  markeredgecolor=INK, zorder=5)  # fmt: skip
        axes.set(xlim=(-0.4, len(places) - 0.6), ylim=(0, (best.throughput or 1.0) * 1.12))
        axes.set_xticks(range(len(places)), [str(place) for place in places])
        axes.grid(axis="y", linewidth=0.3, color=RULE)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
        axes.set_xlabel("micro-batches (chunks)" if key == "chunks" else "devices (partitions)")
        axes.set_ylabel("samples/s")
        axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.98), ncols=3, borderpad=0, handletextpad=0.3,
                    columnspacing=1.0, handlelength=2.2, borderaxespad=0.1)  # fmt: skip

    page.strip(_TOP_IN + 0.12 + _HEIGHT_IN + _AXIS_IN, draw)


def _place(point: Point, key: str) -> int:
    return point.chunks if key == "chunks" else point.n


def _draw_line(axes: Axes, points: Sequence[Point], mode: str, along: tuple[str, list[int]]) -> None:
    key, places = along
    fastest: dict[int, float] = {}
    for point in points:
        if point.throughput:
            place = places.index(_place(point, key))
            fastest[place] = max(fastest.get(place, 0.0), point.throughput)
    if fastest:
        known = sorted(fastest)
        axes.plot(known, [fastest[k] for k in known], label=mode, markersize=3, **_STYLES[mode])


def _add_balances(page: Page, points: Sequence[Point], best: Point) -> None:
    ranked = sorted(points, key=lambda point: -(point.throughput or 0.0))[:_MOST_BALANCES]
    height = len(ranked) * _ROW_IN

    def draw(frame: Frame) -> None:
        frame.text(0.06, 0.03, "Balance: the same with other layers per partition", fontweight="bold")
        axes = frame.axes(1.75, WIDTH_IN - 1.75 - 0.42, _TOP_IN, height)
        axes.set_ylim(len(ranked) - 0.5, -0.5)
        for y, point in enumerate(ranked):
            share = (point.throughput or 0.0) / (best.throughput or 1.0)
            axes.barh(y, share, height=0.62, color=OKABE_ITO["sky"], edgecolor=INK, linewidth=0.25)
            text = significant(point.throughput or 0.0) if point is best else f"{share - 1:+.1%}"
            axes.text(share + 0.02, y, text, va="center_baseline")
        names = [p.row.balance if len(p.row.balance) <= 26 else f"{p.row.balance[:25]}…" for p in ranked]
        axes.set_yticks(range(len(ranked)), names)
        axes.set_xlim(0, 1.005)
        axes.set_xticks([])
        axes.tick_params(axis="y", length=0)
        axes.spines["bottom"].set_visible(False)

    page.strip(_TOP_IN + height + 0.08, draw)
