"""Host time per cell of tiny layers, the engine beside its peers, as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.race import LOOKS, MODES, add_absent, add_head, present
from gpipe_bench.figures.style import FAINT, RIGHT_IN, RULE, WIDTH_IN
from gpipe_bench.results.peer_rows import TINY

if TYPE_CHECKING:
    import pandas as pd

_LEFT_IN: Final = 0.5
_TIME: Final = "host_time_per_cell_us"


def host_time_figure(rows: pd.DataFrame) -> Figure:
    """The figure of some rows, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page()
    add_head(page, "Host time of pipelines and the plain module", rows)
    cells = rows[rows["workload"] == "cells"]
    if any(cells["status"] == "ok"):
        _add_cells(page, cells)
        page.paragraph("A mark for each m and n with so many cells; lines: their median.", colour=FAINT)
    else:
        page.paragraph("No tiny layers in this table.")
    _add_combinations(page, rows[(rows["workload"] == "combinations") & rows["ratio"].notna()])
    add_absent(page, rows[rows["workload"].isin(TINY)])
    return page.render()


def _add_combinations(page: Page, rows: pd.DataFrame) -> None:
    """A line per way to drive the backward pass: the least and the most of all combinations of components."""
    for name in (name for name in present(rows) if name.startswith("engine")):
        own = rows[rows["contender"] == name]
        count, low, high = len(own["variant"].unique()), f"{own['ratio'].min():.2f}", f"{own['ratio'].max():.2f}"
        span = low if low == high else f"{low} to {high}"
        page.paragraph(f"{name}, {count} combination{'s' * (count > 1)}: {span} of {own['baseline'].iloc[0]}'s.")


def _add_cells(page: Page, rows: pd.DataFrame) -> None:
    modes = [mode for mode in MODES if mode in set(rows["checkpoint"])]
    names = [name for name in present(rows) if not name.endswith("-threads")]
    low, high = rows[_TIME].min() / 1.5, rows[_TIME].max() * 1.5
    for k, mode in enumerate(modes):
        own = rows[rows["checkpoint"] == mode]
        title = "Time per cell of tiny layers, µs; checkpoint " if k == 0 else "checkpoint "
        _cells_strip(page, title + mode, own, names, (low, high), last=k == len(modes) - 1)
    _add_legend(page, names)


def _cells_strip(
    page: Page, title: str, rows: pd.DataFrame, names: Sequence[str], reach: tuple[float, float], *, last: bool
) -> None:
    height = 0.95

    def body(frame: Frame) -> None:
        frame.text(0.06, 0.05, title, fontweight="bold")
        axes = frame.axes(_LEFT_IN, WIDTH_IN - _LEFT_IN - RIGHT_IN, 0.24, height)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for name in names:
            _plot_cells(axes, name, rows[(rows["contender"] == name) & (rows["status"] == "ok")])
        sizes = sorted({int(size) for size in rows["partitions"] * rows["chunks"]})
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
        axes.set_xlim(min(sizes) / 1.2, max(sizes) * 1.2)
        axes.set_ylim(*reach)
        ticks = [t for t in (1, 3, 10, 30, 100, 300, 1000, 3000, 10000) if reach[0] <= t <= reach[1]]
        axes.set_yticks(ticks, [str(t) for t in ticks])
        axes.minorticks_off()
        axes.grid(axis="y", linewidth=0.3, color=RULE)
        axes.set_axisbelow(True)
        if last:
            axes.set_xlabel("cells of a step: micro-batches times partitions")

    page.strip(0.24 + height + (0.36 if last else 0.17), body)


def _plot_cells(axes: Axes, name: str, rows: pd.DataFrame) -> None:
    colour, line, marker = LOOKS[name]
    points = rows.assign(size=(rows["partitions"] * rows["chunks"]).astype(int)).sort_values("size", kind="stable")
    medians = points.groupby("size")[_TIME].median()
    axes.plot(medians.index, medians, color=colour, linestyle=line, linewidth=0.7)
    axes.plot(
        points["size"], points[_TIME], linestyle="none", marker=marker, color=colour, markersize=2.4,
        markeredgewidth=0.6,
    )  # fmt: skip


def _add_legend(page: Page, names: Sequence[str]) -> None:
    # Three columns of the longest names are wider than the page.
    columns = 3 if max(map(len, names)) < 20 else 2
    rows = -(-len(names) // columns)

    def body(frame: Frame) -> None:
        axes = frame.axes(0.06, WIDTH_IN - 0.12, 0.0, 0.13 * rows)
        axes.axis("off")
        handles = [
            axes.plot([], [], linestyle, color=colour, marker=marker, markersize=3, linewidth=0.8, label=name)[0]
            for name, (colour, linestyle, marker) in LOOKS.items()
            if name in names
        ]
        axes.legend(
            handles=handles, ncols=columns, loc="upper left", borderpad=0, columnspacing=0.9, handlelength=2.0,
            handletextpad=0.4, borderaxespad=0, labelspacing=0.25,
        )  # fmt: skip

    page.strip(0.13 * rows + 0.06, body)
