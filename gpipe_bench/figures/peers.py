"""Throughput of the engine and its peers as a figure: over the plain module's, beside the limit of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.race import LOOKS, MODES, add_absent, add_head, present
from gpipe_bench.figures.style import FAINT, FONT_PT, INK, RIGHT_IN, WIDTH_IN
from gpipe_bench.results.peer_rows import TINY
from gpipe_bench.results.tables import plain_records

if TYPE_CHECKING:
    import pandas as pd

_NAMES_IN: Final = 1.28
_ROW_IN: Final = 0.125


def peers_figure(rows: pd.DataFrame) -> Figure:
    """The figure of some rows, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page()
    add_head(page, "Throughput of pipelines over the plain module", rows)
    networks = rows[~rows["workload"].isin(TINY)]
    for workload, own in networks.groupby("workload", sort=False):
        _add_throughput(page, str(workload), own)
    page.space(0.03)
    if len(networks):
        page.paragraph("Medians of the rounds' ratios, bars 95% intervals; dashed: limit of GPipe and 1F1B.")
    else:
        page.paragraph("No network in this table.")
    add_absent(page, networks)
    return page.render()


def _add_throughput(page: Page, workload: str, rows: pd.DataFrame) -> None:
    modes = [mode for mode in MODES if mode in set(rows["checkpoint"])]
    names = present(rows)
    height = _ROW_IN * len(names)
    baseline = next(filter(None, rows["baseline"]), "")
    head = rows.iloc[0]
    setting = f"n = {head['partitions']}, m = {head['chunks']}"
    limits = [value for mode in modes if (value := _limit(rows, mode)) is not None]
    reach = max(1.0, *limits, *rows[["ratio", "ratio_high"]].max().dropna()) * 1.06

    def body(frame: Frame) -> None:
        title = f"Throughput over {baseline}, {workload}, {setting}" if baseline else f"{workload}: no baseline"
        frame.text(0.06, 0.05, title, fontweight="bold")
        width = (WIDTH_IN - _NAMES_IN - RIGHT_IN - 0.1 * (len(modes) - 1)) / len(modes)
        for k, mode in enumerate(modes):
            axes = frame.axes(_NAMES_IN + k * (width + 0.1), width, 0.36, height)
            frame.text(_NAMES_IN + k * (width + 0.1), 0.2, f"checkpoint {mode}", color=FAINT)
            _plot_throughput(axes, names, rows[rows["checkpoint"] == mode], _limit(rows, mode))
            axes.set_xlim(0, reach)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
            axes.set_yticks(range(len(names)), names if k == 0 else [""] * len(names))
            axes.tick_params(axis="y", length=0)

    page.strip(0.36 + height + 0.2, body)


def _limit(rows: pd.DataFrame, mode: str) -> float | None:
    """Throughput at the limit over that of the plain loop."""
    loops = rows[(rows["checkpoint"] == mode) & (rows["contender"] == "loop")]
    limits = (loops["limit_samples_per_s"] / loops["throughput_samples_per_s"]).dropna()
    return float(limits.iloc[0]) if len(limits) else None


def _plot_throughput(axes: Axes, names: Sequence[str], rows: pd.DataFrame, limit: float | None) -> None:
    axes.axvline(1, color=INK, linewidth=0.4)
    if limit is not None:
        axes.axvline(limit, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
    axes.set_ylim(len(names) - 0.5, -0.5)
    found = {row["contender"]: row for row in plain_records(rows)}
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
