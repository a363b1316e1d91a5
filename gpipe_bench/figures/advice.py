"""The fastest pipeline for a model on a profile: all that were tried, and what each choice costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gpipe_bench.figures.base import Figure, Panel, Rows, heading, legend, note
from gpipe_bench.figures.points import Point, points_of
from gpipe_bench.figures.style import INK, OKABE_ITO, RULE
from gpipe_bench.figures.tables import read_selected
from gpipe_bench.figures.text import TIMES, significant
from gpipe_bench.results.labels import PAPER, run_as
from gpipe_bench.results.rows import Row
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES

_MOST_BALANCES: Final = 8
_BAR_IN: Final = 0.14
_STYLES: Final[dict[str, dict[str, Any]]] = {
    "always": {"color": OKABE_ITO["vermilion"], "linestyle": "-", "marker": "v", "markersize": 3},
    "except_last": {"color": OKABE_ITO["blue"], "linestyle": "--", "marker": "s", "markersize": 3},
    "never": {"color": OKABE_ITO["green"], "linestyle": ":", "marker": "D", "markersize": 3},
}


def _panels(rows: Sequence[Row], width_in: float) -> Rows:
    points, head = points_of(rows), rows[0]
    good = sorted((point for point in points if point.throughput), key=_rank)
    most = max(point.devices for point in points)
    device = head.device or head.profile
    machine = f"up to {most} {TIMES} {device}" if most > 1 else device
    setting = f"{head.model_args.replace(';', ', ')}; {machine}; {head.variant}; batch of {head.batch_size}"
    if not good:
        title = f"{head.model}: nothing that was tried fits the memory"
        return [heading(title, [head.evidence], setting, width_in)]
    best = good[0]
    way, on = _way(best), f"{best.devices} device{'s' * (best.devices != 1)}"
    name = f"the {PAPER}" if way == PAPER else way
    title = f"{head.model}: fastest with {name} on {on}, {best.chunks} chunks, checkpoint {best.row.checkpoint}"
    found: Rows = [heading(title, [head.evidence], setting, width_in)]
    words = f"{significant(_speed(best))} samples/s, balance {best.row.balance}"
    alike = [point for point in good if (_way(point), point.devices) == (way, best.devices)]
    ways: dict[str, Point] = {}
    for point in good:
        ways.setdefault(_way(point), point)
    found += [
        note(words, width_in, colour=INK),
        legend([Line2D([], [], label=mode, **_STYLES[mode]) for mode in CHECKPOINT_MODES], 3),
        [Panel(partial(_draw_lines, key="chunks", label=f"chunks, {way} on {on}"), alike, 0.75)],
        [Panel(partial(_draw_lines, key="devices", label="devices, each at its fastest"), good, 0.75)],
    ]
    if len(ways) > 1:
        found.append(note("Each schedule with its best devices and chunks:", width_in, colour=INK, bold=True))
        found.append([Panel(partial(_draw_bars, name=_way), [*ways.values()], len(ways) * _BAR_IN)])
    same = [p for p in alike if (p.chunks, p.row.checkpoint) == (best.chunks, best.row.checkpoint)]
    if len(same) > 1:
        balances = same[:_MOST_BALANCES]
        found.append(note("The best with other layers per partition:", width_in, colour=INK, bold=True))
        found.append([Panel(partial(_draw_bars, name=attrgetter("row.balance")), balances, len(balances) * _BAR_IN)])
    absent = "A point that is missing does not fit the memory, or was not tried because it could not be faster."
    found.append(note(f"Circle: the fastest. {absent}", width_in))
    return found


def _speed(point: Point) -> float:
    return point.throughput or 0.0


def _rank(point: Point) -> tuple[float, int, float]:
    """Of equally fast ones the one with fewest devices and least memory is first, as in the advice itself."""
    return -_speed(point), point.devices, point.memory_gib or 0.0


def _way(point: Point) -> str:
    return run_as(point.row)


def _draw_lines(axes: Axes, ranked: Sequence[Point], key: str, label: str) -> None:
    """The fastest of each number of devices or chunks, a line per checkpoint mode."""
    best, places = ranked[0], sorted({getattr(point, key) for point in ranked})
    for mode in CHECKPOINT_MODES:
        fastest: dict[int, float] = {}
        for point in ranked:
            if point.row.checkpoint == mode:
                fastest.setdefault(places.index(getattr(point, key)), _speed(point))
        axes.plot(sorted(fastest), [fastest[place] for place in sorted(fastest)], **_STYLES[mode])
    axes.plot(places.index(getattr(best, key)), _speed(best), "o", markersize=9, markerfacecolor="none",
              markeredgecolor=INK, zorder=5)  # fmt: skip
    axes.set(xlim=(-0.4, len(places) - 0.6), ylim=(0, _speed(best) * 1.15), ylabel="samples/s", xlabel=label)
    axes.set_xticks(range(len(places)), [str(place) for place in places])
    axes.grid(axis="y", linewidth=0.3, color=RULE)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))


def _draw_bars(axes: Axes, ranked: Sequence[Point], name: Callable[[Point], str]) -> None:
    """A bar for each point, from the fastest on, with what it costs."""
    best = _speed(ranked[0])
    axes.set(xlim=(0, 1.25), ylim=(len(ranked) - 0.5, -0.5), xticks=[])
    for y, point in enumerate(ranked):
        share = _speed(point) / best
        axes.barh(y, share, height=0.62, color=OKABE_ITO["sky"], edgecolor=INK, linewidth=0.25)
        text = f"{share - 1:+.1%}".replace("-", "\N{MINUS SIGN}") if y else significant(best)
        axes.text(share + 0.02, y, text, va="center_baseline")
    names = [name(point) for point in ranked]
    axes.set_yticks(range(len(ranked)), [one if len(one) <= 26 else f"{one[:25]}…" for one in names])
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)


ADVICE: Final = Figure(
    name="advice",
    caption=(
        "The fastest simulated pipeline that fits the memory (circle), and what other numbers of chunks and devices, "
        "other checkpoint modes, other schedules and other balances cost. Points that are missing did not fit the "
        "memory, or were not tried because they could not be faster."
    ),
    sources=("",),
    read=read_selected,
    panels=_panels,
)
