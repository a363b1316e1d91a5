"""The figures of the race: throughput beside the limit of a pipeline, and host time of tiny layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.style import FAINT, FONT_PT, INK, OKABE_ITO, RULE, draw
from gpipe_bench.results.peer_rows import TINY, PeerRow
from gpipe_bench.results.tables import plain_records, read_table
from studies.strips import Strip, stacked

MODES: Final = ("never", "except_last", "always")
LOOKS: Final = {
    "engine-autograd": (OKABE_ITO["blue"], "-", "o"),
    "engine-scheduled": (OKABE_ITO["sky"], "-", "D"),
    "engine-autograd-one-thread": (OKABE_ITO["blue"], "--", "1"),
    "engine-scheduled-one-thread": (OKABE_ITO["sky"], "--", "2"),
    "engine-step-gpipe": (OKABE_ITO["sky"], "-", "h"),
    "engine-1f1b": (OKABE_ITO["blue"], "-", "p"),
    "engine-interleaved": (OKABE_ITO["blue"], "-", "<"),
    "engine-zb-h1": (OKABE_ITO["blue"], "-", ">"),
    "torchgpipe": (OKABE_ITO["vermilion"], "--", "^"),
    "fairscale": (OKABE_ITO["orange"], "--", "v"),
    "distributed-gpipe": (OKABE_ITO["sky"], ":", "$G$"),
    "distributed-1f1b": (OKABE_ITO["blue"], ":", "$F$"),
    "distributed-interleaved": (OKABE_ITO["blue"], ":", "$I$"),
    "distributed-zb-h1": (OKABE_ITO["blue"], ":", "$H$"),
    "distributed-zb-v": (OKABE_ITO["blue"], ":", "$V$"),
    "pipelining-gpipe": (OKABE_ITO["green"], "-.", "s"),
    "pipelining-1f1b": (OKABE_ITO["purple"], "-.", "P"),
    "pipelining-interleaved": (OKABE_ITO["purple"], "-.", "H"),
    "pipelining-zero-bubble": (OKABE_ITO["purple"], "-.", "8"),
    "pipelining-zb-v": (OKABE_ITO["purple"], "-.", "3"),
    "loop": (OKABE_ITO["black"], ":", "x"),
    "plain": (FAINT, ":", "+"),
    "loop-threads": (OKABE_ITO["black"], ":", "X"),
    "plain-threads": (FAINT, ":", "*"),
    "loop-processes": (OKABE_ITO["black"], "--", "d"),
}
"""Colour, line and marker of each contender; none shares more than the colour with another."""

_TIME: Final = "host_time_per_cell_us"


def draw_race(rows_csv: Path, out_stem: Path) -> list[Path]:
    """Draw both figures of a table of rows; gives the paths, ``<out_stem>_host`` behind ``<out_stem>``.

    Raises:
        ConfigError: the table cannot be read, lacks columns, or has nothing to draw; all such problems.
        OutputError: a figure cannot be written.
    """
    rows = read_table(rows_csv, PeerRow.columns(), PeerRow)
    if not any(rows["status"] == "ok"):
        raise ConfigError([f"table must have a row that is ok, got none in {rows_csv}; read their reasons"])
    host = out_stem.with_name(f"{out_stem.name}_host")
    return [*draw(throughput_figure, rows, out_stem), *draw(host_time_figure, rows, host)]


def draw_reference(out: Path = Path("figures/reference")) -> Iterator[list[Path]]:
    """Draw the committed tables below ``out``; gives the paths of each table."""
    for table in sorted(REFERENCE_FOLDER.glob("measured/*/peers.csv")):
        yield draw_race(table, out / f"measured-{table.parent.name}" / "peers")


def throughput_figure(rows: pd.DataFrame) -> Figure:
    """Throughput of networks over the plain loop's, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    networks = rows[~rows["workload"].isin(TINY)]
    parts = [(str(name), own) for name, own in networks.groupby("workload", sort=False)]
    strips = [
        Strip(_title(name, own), 0.125 * len(present(own)), 1.28, above_in=0.16, columns=len(_modes(own)))
        for name, own in parts
    ]
    notes = ["Medians of the rounds' ratios, bars 95% intervals;", "dashed: limit of GPipe and 1F1B."]
    notes = [*(notes if parts else ["No network in this table."]), *_absent(networks)]
    head, evidence = _head("Throughput of pipelines over the plain module", rows)
    figure, axes = stacked(head, evidence, strips, notes)
    for row, (_, own) in zip(axes, parts, strict=True):
        for number, (one, mode) in enumerate(zip(row, _modes(own), strict=True)):
            _plot_throughput(one, own, mode, named=not number)
    return figure


def host_time_figure(rows: pd.DataFrame) -> Figure:
    """Host time per cell of tiny layers, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    cells = rows[(rows["workload"] == "cells") & (rows["status"] == "ok")]
    names, modes = [name for name in present(cells) if not name.endswith("-threads")], _modes(cells)
    strips = [
        Strip(
            f"Time per cell of tiny layers, µs; checkpoint {mode}", 0.95, 0.5, below_in=0.2 + 0.14 * (mode == modes[-1])
        )
        for mode in modes
    ]
    notes = ["A mark for each m and n with so many cells; lines: their median."] if modes else ["No tiny layers here."]
    notes += [*_combinations(rows), *_absent(rows[rows["workload"].isin(TINY)])]
    legend = [Strip("", 0.13 * -(-len(names) // 2), 0.06, below_in=0.06)] if modes else []
    head, evidence = _head("Host time of pipelines and the plain module", rows)
    figure, axes = stacked(head, evidence, [*strips, *legend], notes)
    for (own,), mode in zip(axes, modes, strict=False):
        _plot_cells(own, cells, mode, names)
        if mode == modes[-1]:
            own.set_xlabel("cells of a step: micro-batches times partitions")
            axes[-1][0].axis("off")
            axes[-1][0].legend(
                *own.get_legend_handles_labels(), ncols=2, loc="upper left", borderpad=0, columnspacing=0.9,
                handlelength=2.0, handletextpad=0.4, borderaxespad=0, labelspacing=0.25,
            )  # fmt: skip
    return figure


def present(rows: pd.DataFrame) -> list[str]:
    """Contenders with a row, in the order of the legend."""
    return [name for name in LOOKS if name in set(rows["contender"])]


def _modes(rows: pd.DataFrame) -> list[str]:
    return [mode for mode in MODES if mode in set(rows["checkpoint"])]


def _title(workload: str, rows: pd.DataFrame) -> str:
    (head,) = plain_records(rows.head(1))
    baseline = next(filter(None, rows["baseline"].dropna()), "")
    over = f"Throughput over {baseline}, {workload}" if baseline else f"{workload}: no baseline"
    return f"{over}, n = {head['partitions']}, m = {head['chunks']}"


def _head(title: str, rows: pd.DataFrame) -> tuple[list[str], str]:
    """Title, machine and packages of the race; the kind of its numbers."""
    (head,) = plain_records(rows[rows["status"] == "ok"].head(1))
    peers = rows[rows["package"].isin(["torchgpipe", "fairscale"])].groupby("package", sort=False)["package_version"]
    packages = [f"torch {head['torch']}", *(f"{name} {version or '-'}" for name, version in peers.last().items())]
    return [title, f"{head['device']}, {head['cores'] or '?'} cores", ", ".join(packages)], str(head["evidence"])


def _absent(rows: pd.DataFrame) -> list[str]:
    """Who could not take part everywhere."""
    failed = rows[rows["status"] != "ok"]
    who = sorted({*(failed["contender"] + ": " + failed["status"])})
    return [f"Not everywhere here: {', '.join(who[k : k + 2])}" for k in range(0, len(who), 2)]


def _combinations(rows: pd.DataFrame) -> Iterator[str]:
    """A line per executor of the engine: the least and the most of all combinations of components."""
    tried = rows[(rows["workload"] == "combinations") & rows["ratio"].notna()]
    for name in (name for name in present(tried) if name.startswith("engine")):
        own = tried[tried["contender"] == name]
        count, low, high = len(own["variant"].unique()), f"{own['ratio'].min():.2f}", f"{own['ratio'].max():.2f}"
        span = low if low == high else f"{low} to {high}"
        yield f"{name}, {count} combination{'s' * (count > 1)}: {span} of {own['baseline'].iloc[0]}'s."


def limit(rows: pd.DataFrame, mode: str) -> float | None:
    """Throughput at the limit over that of the plain loop."""
    loops = rows[(rows["checkpoint"] == mode) & (rows["contender"] == "loop")]
    limits = (loops["limit_samples_per_s"] / loops["throughput_samples_per_s"]).dropna()
    return float(limits.iloc[0]) if len(limits) else None


def _plot_throughput(axes: Axes, rows: pd.DataFrame, mode: str, *, named: bool) -> None:
    names, least = present(rows), limit(rows, mode)
    axes.set_title(f"checkpoint {mode}", fontsize=FONT_PT, color=FAINT, pad=3)
    axes.axvline(1, color=INK, linewidth=0.4)
    if least is not None:
        axes.axvline(least, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
    found = {row["contender"]: row for row in plain_records(rows[rows["checkpoint"] == mode])}
    for y, name in enumerate(names):
        row = found.get(name)
        if row is None or row["ratio"] is None:
            words = "" if row is None or row["status"] == "ok" else row["status"]
            axes.text(0.05, y, words, va="center", color=FAINT, fontsize=FONT_PT)
            continue
        colour, _, marker = LOOKS[name]
        if row["ratio_low"] is not None:
            axes.plot([row["ratio_low"], row["ratio_high"]], [y, y], color=colour)
        axes.plot(row["ratio"], y, linestyle="none", marker=marker, color=colour, markersize=3.4)
    reach = [value for other in _modes(rows) if (value := limit(rows, other)) is not None]
    axes.set_xlim(0, 1.06 * max(1.0, *reach, *rows[["ratio", "ratio_high"]].max().dropna()))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names if named else [""] * len(names))
    axes.tick_params(axis="y", length=0)


def _plot_cells(axes: Axes, rows: pd.DataFrame, mode: str, names: list[str]) -> None:
    rows = rows.assign(size=(rows["partitions"] * rows["chunks"]).astype(int)).sort_values("size", kind="stable")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name in names:
        colour, line, marker = LOOKS[name]
        own = rows[(rows["contender"] == name) & (rows["checkpoint"] == mode)]
        medians = own.groupby("size")[_TIME].median()
        axes.plot(medians.index, medians, color=colour, linestyle=line, linewidth=0.7)
        points = axes.plot(own["size"], own[_TIME], linestyle="none", marker=marker, color=colour)
        points[0].set(markersize=2.4, markeredgewidth=0.6)
        axes.plot([], [], color=colour, linestyle=line, linewidth=0.8, marker=marker, markersize=3, label=name)
    sizes, low, high = sorted(set(rows["size"])), rows[_TIME].min() / 1.5, rows[_TIME].max() * 1.5
    axes.xaxis.set_major_locator(FixedLocator([float(size) for size in sizes]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
    axes.set_ylim(low, high)
    ticks = [tick for tick in (1, 3, 10, 30, 100, 300, 1000, 3000, 10000) if low <= tick <= high]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", linewidth=0.3, color=RULE)
    axes.set_axisbelow(True)
