"""The best chunks and balance for a model on a profile: all that were tried, and what each choice costs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gpipe_bench.figures.base import Figure, Panel, Rows, heading, legend, note
from gpipe_bench.figures.points import Point, points_of
from gpipe_bench.figures.style import INK, OKABE_ITO, RULE
from gpipe_bench.figures.sweep import machine_words
from gpipe_bench.figures.tables import read_selected
from gpipe_bench.figures.text import significant
from gpipe_bench.results.rows import Row
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES

_MOST_BALANCES: Final = 8
_STYLES: Final[dict[str, dict[str, Any]]] = {
    "always": {"color": OKABE_ITO["vermilion"], "linestyle": "-", "marker": "v", "markersize": 3},
    "except_last": {"color": OKABE_ITO["blue"], "linestyle": "--", "marker": "s", "markersize": 3},
    "never": {"color": OKABE_ITO["green"], "linestyle": ":", "marker": "D", "markersize": 3},
}


def _panels(rows: Sequence[Row], width_in: float) -> Rows:
    points, head = points_of(rows), rows[0]
    good = [point for point in points if point.throughput]
    setting = f"{machine_words(head)}; batch of {head.batch_size}"
    if not good:
        title = f"{head.model}: nothing that was tried fits the memory"
        return [heading(title, [head.evidence], setting, width_in)]
    best = max(good, key=lambda point: point.throughput or 0.0)
    title = f"{head.model}: fastest with {best.chunks} chunks on {best.n} devices, checkpoint {best.row.checkpoint}"
    found: Rows = [heading(title, [head.evidence], setting, width_in)]
    words = f"{significant(best.throughput or 0.0)} samples/s, balance {best.row.balance}"
    chunks = [point for point in points if point.n == best.n]
    same = [p for p in good if (p.n, p.chunks, p.row.checkpoint) == (best.n, best.chunks, best.row.checkpoint)]
    found += [
        note(words, width_in, colour=INK),
        legend([Line2D([], [], label=mode, **_STYLES[mode]) for mode in CHECKPOINT_MODES], 3),
        [Panel(partial(_draw_lines, key="chunks", best=best), chunks, 0.85)],
        [Panel(partial(_draw_lines, key="n", best=best), points, 0.85)],
    ]
    if len(same) > 1:
        ranked = sorted(same, key=lambda point: -(point.throughput or 0.0))[:_MOST_BALANCES]
        found.append(note("The same with other layers per partition:", width_in, colour=INK, bold=True))
        found.append([Panel(_draw_balances, ranked, len(ranked) * 0.14)])
    found.append(note("Circle: the fastest. A point that is missing does not fit the memory.", width_in))
    return found


def _draw_lines(axes: Axes, points: Sequence[Point], key: str, best: Point) -> None:
    """The fastest of each number of devices or chunks, a line per checkpoint mode."""
    places = sorted({getattr(point, key) for point in points if point.throughput})
    for mode in CHECKPOINT_MODES:
        fastest: dict[int, float] = {}
        for point in points:
            if point.throughput and point.row.checkpoint == mode:
                place = places.index(getattr(point, key))
                fastest[place] = max(fastest.get(place, 0.0), point.throughput)
        axes.plot(sorted(fastest), [fastest[place] for place in sorted(fastest)], **_STYLES[mode])
    axes.plot(places.index(getattr(best, key)), best.throughput or 0.0, "o", markersize=9, markerfacecolor="none",
              markeredgecolor=INK, zorder=5)  # fmt: skip
    axes.set(xlim=(-0.4, len(places) - 0.6), ylim=(0, (best.throughput or 1.0) * 1.15), ylabel="samples/s")
    axes.set_xticks(range(len(places)), [str(place) for place in places])
    axes.grid(axis="y", linewidth=0.3, color=RULE)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    on = f"chunks, on {best.n} devices" if key == "chunks" else "devices, each with its best chunks"
    axes.set_xlabel(on)


def _draw_balances(axes: Axes, ranked: Sequence[Point]) -> None:
    best = ranked[0].throughput or 1.0
    axes.set(xlim=(0, 1.25), ylim=(len(ranked) - 0.5, -0.5), xticks=[])
    for y, point in enumerate(ranked):
        share = (point.throughput or 0.0) / best
        axes.barh(y, share, height=0.62, color=OKABE_ITO["sky"], edgecolor=INK, linewidth=0.25)
        text = f"{share - 1:+.1%}".replace("-", "\N{MINUS SIGN}") if y else significant(best)
        axes.text(share + 0.02, y, text, va="center_baseline")
    names = [p.row.balance if len(p.row.balance) <= 26 else f"{p.row.balance[:25]}…" for p in ranked]
    axes.set_yticks(range(len(ranked)), names)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)


ADVICE: Final = Figure(
    name="advice",
    caption=(
        "The fastest simulated pipeline that fits the memory (circle), and what other numbers of chunks and devices, "
        "other checkpoint modes and other balances cost. Points that are missing did not fit the memory."
    ),
    sources=("",),
    read=read_selected,
    panels=_panels,
)
