"""The race of peers as a figure: host time per cell of tiny layers, and throughput beside the limit."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.style import FAINT, FONT_PT, INK, OKABE_ITO, RIGHT_IN, RULE, WIDTH_IN, drawing, save
from gpipe_bench.peer_rows import PeerRow

__all__ = ["draw_peers", "peers_figure"]

_LEFT_IN: Final = 0.5
_NAMES_IN: Final = 1.08
_ROW_IN: Final = 0.125
_MODES: Final = ("never", "except_last", "always")
# Colour, line and marker of each contender; none shares more than the colour with another.
_STYLES: Final = {
    "engine-autograd": (OKABE_ITO["blue"], "-", "o"),
    "engine-scheduled": (OKABE_ITO["sky"], "-", "D"),
    "torchgpipe": (OKABE_ITO["vermilion"], "--", "^"),
    "fairscale": (OKABE_ITO["orange"], "--", "v"),
    "pipelining-gpipe": (OKABE_ITO["green"], "-.", "s"),
    "pipelining-1f1b": (OKABE_ITO["purple"], "-.", "P"),
    "loop": (OKABE_ITO["black"], ":", "x"),
    "plain": (FAINT, ":", "+"),
    "loop-threads": (OKABE_ITO["black"], ":", "X"),
    "plain-threads": (FAINT, ":", "*"),
}

Record = Mapping[str, str]


def draw_peers(rows_csv: Path, out_stem: Path) -> list[Path]:
    """Draw the table of the race.

    Args:
        rows_csv: rows with the columns of :class:`gpipe_bench.peer_rows.PeerRow`.
        out_stem: path of the figure without its suffix.

    Returns:
        The paths written: SVG, PDF, PNG.

    Raises:
        ConfigError: the table cannot be read, lacks columns, or has nothing to draw; all such problems.
        OutputError: the figure cannot be written.
    """
    try:
        with rows_csv.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            missing = sorted(set(PeerRow.columns()) - set(reader.fieldnames or ()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            [f"table must be a readable CSV file, got {rows_csv} ({error}); run the race first"]
        ) from error
    problems = [f"columns of {rows_csv} must include {name!r}, got none; run the race again" for name in missing]
    if not problems and not any(row["status"] == "ok" for row in rows):
        problems = [f"table must have a row that is ok, got none in {rows_csv}; read their reasons"]
    if problems:
        raise ConfigError(problems)
    with drawing():
        return save(peers_figure(rows), out_stem)


def peers_figure(rows: Sequence[Record]) -> Figure:
    """The figure of some rows, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page()
    head = next(row for row in rows if row["status"] == "ok")
    page.heading("Engine, other pipelines, plain module", head["evidence"])
    page.paragraph(f"{head['device']}, {head['cores']} cores, torch {head['torch']}; {_versions(rows)}", colour=FAINT)
    cells = [row for row in rows if row["workload"] == "cells"]
    if any(row["status"] == "ok" for row in cells):
        _add_cells(page, cells)
    _add_combinations(page, [row for row in rows if row["workload"] == "combinations" and row["ratio"]])
    networks = [row for row in rows if row["workload"] not in {"cells", "combinations"}]
    for workload in dict.fromkeys(row["workload"] for row in networks):
        _add_throughput(page, workload, [row for row in networks if row["workload"] == workload])
    page.space(0.03)
    if networks:
        page.paragraph("Throughput: medians of the rounds' ratios, bars 95% intervals; dashed: limit of the pipelines.")
    absent = sorted({f"{row['contender']}: {row['status']}" for row in rows if row["status"] != "ok"})
    if absent:
        page.paragraph(f"Not everywhere here: {', '.join(absent)}; the table has the reasons.", colour=FAINT)
    return page.render()


def _add_combinations(page: Page, rows: Sequence[Record]) -> None:
    """A line per way to drive the backward pass: the least and the most of all combinations of components."""
    for name in (name for name in _present(rows) if name.startswith("engine")):
        ratios = [float(row["ratio"]) for row in rows if row["contender"] == name]
        base = next(row["baseline"] for row in rows if row["contender"] == name)
        count = len({row["variant"] for row in rows if row["contender"] == name})
        page.paragraph(f"{name}, {count} combinations: {min(ratios):.2f} to {max(ratios):.2f} of {base}'s.")


def _versions(rows: Sequence[Record]) -> str:
    peers = {row["package"]: row["package_version"] for row in rows if row["package"] in {"torchgpipe", "fairscale"}}
    return ", ".join(f"{name} {version or '-'}" for name, version in peers.items())


def _present(rows: Sequence[Record]) -> list[str]:
    known = {row["contender"] for row in rows}
    return [name for name in _STYLES if name in known]


def _add_cells(page: Page, rows: Sequence[Record]) -> None:
    modes = [mode for mode in _MODES if any(row["checkpoint"] == mode for row in rows)]
    names = [name for name in _present(rows) if not name.endswith("-threads")]
    times = [float(row["host_time_per_cell_us"]) for row in rows if row["host_time_per_cell_us"]]
    low, high = min(times) / 1.5, max(times) * 1.5
    for k, mode in enumerate(modes):
        own = [row for row in rows if row["checkpoint"] == mode]
        title = "Host time per cell of tiny layers, µs; checkpoint " if k == 0 else "checkpoint "
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
            axes.set_xlabel("cells of a step: micro-batches times partitions (lines: median)")

    page.strip(0.24 + height + (0.3 if last else 0.17), body)


def _plot_cells(axes: Axes, name: str, rows: Sequence[Record]) -> None:
    colour, line, marker = _STYLES[name]
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
            for name, (colour, linestyle, marker) in _STYLES.items()
            if name in names
        ]
        axes.legend(
            handles=handles, ncols=columns, loc="upper left", borderpad=0, columnspacing=0.9, handlelength=2.0,
            handletextpad=0.4, borderaxespad=0, labelspacing=0.25,
        )  # fmt: skip

    page.strip(0.13 * rows + 0.06, body)


def _add_throughput(page: Page, workload: str, rows: Sequence[Record]) -> None:
    modes = [mode for mode in _MODES if any(row["checkpoint"] == mode for row in rows)]
    names = _present(rows)
    height = _ROW_IN * len(names)
    baseline = next((row["baseline"] for row in rows if row["baseline"]), "")
    head = rows[0]
    setting = f"n = {head['partitions']}, m = {head['chunks']}"
    ends = [float(row[key]) for row in rows for key in ("ratio", "ratio_high") if row[key]]
    limits = [value for mode in modes if (value := _limit(rows, mode)) is not None]
    reach = max([1.0, *ends, *limits]) * 1.06

    def body(frame: Frame) -> None:
        title = f"Throughput over {baseline}, {workload}, {setting}" if baseline else f"{workload}: no baseline"
        frame.text(0.06, 0.05, title, fontweight="bold")
        width = (WIDTH_IN - _NAMES_IN - RIGHT_IN - 0.1 * (len(modes) - 1)) / len(modes)
        for k, mode in enumerate(modes):
            axes = frame.axes(_NAMES_IN + k * (width + 0.1), width, 0.36, height)
            frame.text(_NAMES_IN + k * (width + 0.1), 0.2, f"checkpoint {mode}", color=FAINT)
            _plot_throughput(axes, names, [row for row in rows if row["checkpoint"] == mode], _limit(rows, mode))
            axes.set_xlim(0, reach)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
            axes.set_yticks(range(len(names)), names if k == 0 else [""] * len(names))
            axes.tick_params(axis="y", length=0)

    page.strip(0.36 + height + 0.2, body)


def _limit(rows: Sequence[Record], mode: str) -> float | None:
    """Throughput at the limit over that of the plain loop."""
    for row in rows:
        if row["checkpoint"] == mode and row["contender"] == "loop" and row["limit_samples_per_s"]:
            return float(row["limit_samples_per_s"]) / float(row["throughput_samples_per_s"])
    return None


def _plot_throughput(axes: Axes, names: Sequence[str], rows: Sequence[Record], limit: float | None) -> None:
    axes.axvline(1, color=INK, linewidth=0.4)
    if limit is not None:
        axes.axvline(limit, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
    axes.set_ylim(len(names) - 0.5, -0.5)
    found = {row["contender"]: row for row in rows}
    for y, name in enumerate(names):
        row = found.get(name)
        if row is None or not row["ratio"]:
            words = "" if row is None or row["status"] == "ok" else row["status"]
            axes.text(0.05, y, words, va="center", color=FAINT, fontsize=FONT_PT)
            continue
        colour, _, marker = _STYLES[name]
        if row["ratio_low"]:
            axes.plot([float(row["ratio_low"]), float(row["ratio_high"])], [y, y], color=colour)
        axes.plot(float(row["ratio"]), y, marker, color=colour, markersize=3.4)
