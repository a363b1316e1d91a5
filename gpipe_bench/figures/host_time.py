"""Host time per cell of tiny layers, the engine beside its peers, as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.race import LOOKS, MODES, Record, add_absent, add_head, draw_race, present
from gpipe_bench.figures.style import FAINT, RIGHT_IN, RULE, WIDTH_IN
from gpipe_bench.peer_rows import TINY

__all__ = ["draw_host_time", "host_time_figure"]

_LEFT_IN: Final = 0.5


def draw_host_time(rows_csv: Path, out_stem: Path) -> list[Path]:
    """Draw the tiny layers of the race; arguments, results and errors are those of :func:`draw_race`."""
    return draw_race(host_time_figure, rows_csv, out_stem)


def host_time_figure(rows: Sequence[Record]) -> Figure:
    """The figure of some rows, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page()
    add_head(page, "Host time of pipelines and the plain module", rows)
    cells = [row for row in rows if row["workload"] == "cells"]
    if any(row["status"] == "ok" for row in cells):
        _add_cells(page, cells)
        page.paragraph("A mark for each m and n with so many cells; lines: their median.", colour=FAINT)
    else:
        page.paragraph("No tiny layers in this table.")
    _add_combinations(page, [row for row in rows if row["workload"] == "combinations" and row["ratio"]])
    add_absent(page, [row for row in rows if row["workload"] in TINY])
    return page.render()


def _add_combinations(page: Page, rows: Sequence[Record]) -> None:
    """A line per way to drive the backward pass: the least and the most of all combinations of components."""
    for name in (name for name in present(rows) if name.startswith("engine")):
        ratios = [float(row["ratio"]) for row in rows if row["contender"] == name]
        base = next(row["baseline"] for row in rows if row["contender"] == name)
        count = len({row["variant"] for row in rows if row["contender"] == name})
        page.paragraph(f"{name}, {count} combinations: {min(ratios):.2f} to {max(ratios):.2f} of {base}'s.")


def _add_cells(page: Page, rows: Sequence[Record]) -> None:
    modes = [mode for mode in MODES if any(row["checkpoint"] == mode for row in rows)]
    names = [name for name in present(rows) if not name.endswith("-threads")]
    times = [float(row["host_time_per_cell_us"]) for row in rows if row["host_time_per_cell_us"]]
    low, high = min(times) / 1.5, max(times) * 1.5
    for k, mode in enumerate(modes):
        own = [row for row in rows if row["checkpoint"] == mode]
        title = "Time per cell of tiny layers, µs; checkpoint " if k == 0 else "checkpoint "
        _cells_strip(page, title + mode, own, names, (low, high), last=k == len(modes) - 1)
    _add_legend(page, names)


def _cells_strip(
    page: Page, title: str, rows: Sequence[Record], names: Sequence[str], reach: tuple[float, float], *, last: bool
) -> None:
    height = 0.95

    def body(frame: Frame) -> None:
        frame.text(0.06, 0.05, title, fontweight="bold")
        axes = frame.axes(_LEFT_IN, WIDTH_IN - _LEFT_IN - RIGHT_IN, 0.24, height)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for name in names:
            _plot_cells(axes, name, [row for row in rows if row["contender"] == name and row["status"] == "ok"])
        sizes = sorted({int(row["partitions"]) * int(row["chunks"]) for row in rows})
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


def _plot_cells(axes: Axes, name: str, rows: Sequence[Record]) -> None:
    colour, line, marker = LOOKS[name]
    points: dict[int, list[float]] = {}
    for row in rows:
        size = int(row["partitions"]) * int(row["chunks"])
        points.setdefault(size, []).append(float(row["host_time_per_cell_us"]))
    sizes = sorted(points)
    axes.plot(sizes, [median(points[size]) for size in sizes], color=colour, linestyle=line, linewidth=0.7)
    flat = [(size, value) for size in sizes for value in points[size]]
    axes.plot([x for x, _ in flat], [y for _, y in flat], marker, color=colour, markersize=2.4, markeredgewidth=0.6)


def _add_legend(page: Page, names: Sequence[str]) -> None:
    columns, rows = 3, -(-len(names) // 3)

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
