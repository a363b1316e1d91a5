"""The figure of the race: throughput over the plain loop's, beside the limit of a pipeline; host time of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.base import PAGE_IN, Figure, Panel, Rows, Selection, heading, note
from gpipe_bench.figures.style import FAINT, INK, OKABE_ITO, RULE
from gpipe_bench.figures.text import TIMES, listing
from gpipe_bench.results.rows import TINY, PeerRow
from gpipe_bench.results.tables import plain_records, read_table

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
    "distributed-gpipe": (OKABE_ITO["sky"], ":", (4, 1, 0)),
    "distributed-1f1b": (OKABE_ITO["blue"], ":", (4, 1, 45)),
    "distributed-interleaved": (OKABE_ITO["blue"], ":", (6, 1, 0)),
    "distributed-zb-h1": (OKABE_ITO["blue"], ":", (8, 1, 0)),
    "distributed-zb-v": (OKABE_ITO["blue"], ":", (3, 1, 180)),
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

_OURS: Final = ("engine", "distributed")
_OTHERS: Final = ("torchgpipe", "fairscale", "pipelining")
_FAR: Final = 3.0
_LINE_IN: Final = 0.125
_USUAL_CHUNKS: Final = 32


@dataclass(frozen=True, slots=True)
class _Contest:
    """What one panel shows: some rows, a line for each of some contenders, and the limit that none should pass."""

    rows: pd.DataFrame
    names: Sequence[str]
    title: str
    label: tuple[str, str]
    reach: float
    limit: float | None
    first: bool


def _read(rows_csv: Path, _: Selection) -> pd.DataFrame:
    rows = read_table(rows_csv, PeerRow.columns(), PeerRow)
    if not any(rows["status"] == "ok"):
        raise ConfigError([f"table must have a row that is ok, got none in {rows_csv}; read their reasons"])
    return rows


def _panels(rows: pd.DataFrame, width_in: float) -> Rows:
    (head,) = plain_records(rows[rows["status"] == "ok"].head(1))
    machine = f"{head['device']}, {head['cores'] or '?'} cores, torch {head['torch']}"
    setting = "; ".join(filter(None, (machine, _versions(rows))))
    networks = rows[~rows["workload"].isin(TINY)]
    found: Rows = [heading(finding(networks), [head["evidence"]], setting, width_in)]
    if len(networks):
        found.append(_throughput(networks))
    cells = rows[(rows["workload"] == "cells") & rows["ratio"].notna() & (rows["contender"] != rows["baseline"])]
    if len(cells):
        found.append(_host_time(cells))
    failed = rows[rows["status"] != "ok"]
    if absent := sorted({*(failed["contender"] + ": " + failed["status"])}):
        found.append(note(f"Not everywhere: {', '.join(absent)}; the table has the reasons.", width_in))
    found.append(note(_reading(networks, cells), width_in))
    return found


def _reading(networks: pd.DataFrame, cells: pd.DataFrame) -> str:
    """What marks, bars and lines of the panels that are drawn mean."""
    words = ["Marks: medians of the rounds; bars: 95 % intervals; an arrow: the value lies beyond the axis."]
    if len(networks):
        words.append("Throughput is over that of a plain loop of micro-batches; dashed: the limit of GPipe and 1F1B.")
    if len(cells):
        modes = [mode for mode in MODES if mode in set(cells["checkpoint"])]
        order = f", for checkpoint {listing(modes)} from top to bottom" if len(modes) > 1 else ""
        words.append(f"Host time is per micro-batch and partition{order}; less is better.")
    return " ".join(words)


def finding(networks: pd.DataFrame) -> str:
    """Throughput of the fastest of our pipelines and of the fastest other one, over the loop, on all networks."""
    words = []
    for whose, prefixes in (("ours", _OURS), ("another", _OTHERS)):
        own = networks[networks["contender"].str.startswith(prefixes) & networks["ratio"].notna()]
        best = own.groupby(["workload", "checkpoint"])["ratio"].max()
        if len(best):
            ends = [f"{end:.2f}" for end in (best.min(), best.max())]
            words.append(f"{whose} {ends[0] if ends[0] == ends[1] else ' to '.join(ends)}{TIMES}")
    if not words:
        return "Host time of pipelines, side by side"
    return f"Throughput of the fastest pipeline over a plain loop, by network: {', '.join(words)}"


def _versions(rows: pd.DataFrame) -> str:
    peers = rows[rows["package"].isin(["torchgpipe", "fairscale"])].groupby("package", sort=False)["package_version"]
    return ", ".join(f"{name} {version or '-'}" for name, version in peers.last().items())


def present(rows: pd.DataFrame) -> list[str]:
    """Contenders with a row, in the order of the legend."""
    return [name for name in LOOKS if name in set(rows["contender"])]


def _throughput(rows: pd.DataFrame) -> Sequence[Panel]:
    """A panel per network and checkpoint mode, with the same contenders in each."""
    names, reach = present(rows), _reach(rows, *filter(None, (limit(own) for _, own in rows.groupby("workload"))))
    panels: list[Panel] = []
    for (workload, mode), own in rows.groupby(["workload", "checkpoint"], sort=False):
        baseline = next(filter(None, own["baseline"]), "")
        title = f"{workload}, {mode}" if len(f"{workload}{mode}") < 14 else f"{workload},\n{mode}"
        shown = _Contest(own, names, title, ("throughput", f"over {baseline}"), reach, limit(own), not panels)
        panels.append(Panel(_draw, shown, _LINE_IN * len(names)))
    return panels


def _host_time(rows: pd.DataFrame) -> Sequence[Panel]:
    """A panel per number of partitions: host time per cell of tiny layers, a mark per checkpoint mode."""
    chunks = min(rows["chunks"].unique(), key=lambda m: abs(m - _USUAL_CHUNKS))
    rows = rows[rows["chunks"] == chunks]
    names, reach = present(rows), _reach(rows)
    panels: list[Panel] = []
    for n, own in rows.groupby("partitions"):
        label, title = ("host time", f"over {own['baseline'].iloc[0]}"), f"tiny layers, n={n}, m={chunks}"
        panels.append(Panel(_draw, _Contest(own, names, title, label, reach, None, not panels), _LINE_IN * len(names)))
    return panels


def _reach(rows: pd.DataFrame, *limits: float) -> float:
    """The end of the axis: beyond all but contenders that would press the others together; those are numbers."""
    ends = rows[["ratio", "ratio_high"]].max(axis=1).groupby(rows["contender"]).max().dropna().sort_values()
    while len(ends) > 2 and ends.iloc[-1] > _FAR * max(1.0, ends.iloc[-2]):
        ends = ends.iloc[:-1]
    return float(1.06 * max(1.0, *limits, ends.max()))


def limit(rows: pd.DataFrame) -> float | None:
    """Throughput at the limit over that of the plain loop."""
    loops = rows[rows["contender"] == "loop"]
    limits = (loops["limit_samples_per_s"] / loops["throughput_samples_per_s"]).dropna()
    return float(limits.iloc[0]) if len(limits) else None


def _draw(axes: Axes, contest: _Contest) -> None:
    rows, names, least = contest.rows, contest.names, contest.limit
    axes.set_title(contest.title, fontsize="medium", pad=2)
    axes.axvline(1, color=INK, linewidth=0.4)
    if least is not None:
        axes.axvline(least, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
    modes = [mode for mode in MODES if mode in set(rows["checkpoint"])]
    for y, name in enumerate(names):
        for row in plain_records(rows[rows["contender"] == name]):
            place = y + 0.28 * (modes.index(row["checkpoint"]) - (len(modes) - 1) / 2)
            if row["ratio"] is None:
                words = "" if row["status"] == "ok" else row["status"]
                axes.text(0.05, y, words, va="center_baseline", color=FAINT)
                continue
            colour, _, marker = LOOKS[name]
            if row["ratio"] > contest.reach:
                far = f"{row['ratio']:.1f}{TIMES} \N{RIGHTWARDS ARROW}"
                axes.text(0.98 * contest.reach, place, far, ha="right", va="center_baseline")
                continue
            if row["ratio_low"] is not None:
                axes.plot([row["ratio_low"], row["ratio_high"]], [place, place], color=colour)
            size = 3.4 / len(modes) ** 0.3
            # The edge of the axes cuts no mark of a ratio near 0.
            axes.plot(
                row["ratio"], place, linestyle="none", marker=marker, color=colour, markersize=size, clip_on=False
            )
        if y:
            axes.axhline(y - 0.5, linewidth=0.2, color=RULE, zorder=0)
    axes.set(xlim=(0, contest.reach), ylim=(len(names) - 0.5, -0.5))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.set_yticks(range(len(names)), names if contest.first else [""] * len(names))
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(contest.label[1])
    axes.set_ylabel(contest.label[0] if contest.first else "")


FIGURE: Final = Figure(
    name="peers",
    caption=(
        "Above: throughput of this engine and of other pipelines over a plain loop of micro-batches; dashed: the limit "
        "of GPipe and 1F1B. Below, of tiny layers: host time per micro-batch and partition, less is better, "
        "for checkpoint never, except_last and always from top to bottom. Marks: medians of the rounds; bars: 95 % "
        "intervals; an arrow: the value lies beyond the axis."
    ),
    sources=("",),
    read=_read,
    panels=_panels,
    width_in=PAGE_IN,
)
