"""A sweep as maps: throughput over partitions and micro-batches, a map per checkpoint mode and kind of batch.

Every cell shows its number, so that the colour is only a guide; the best of each row of maps has a frame, and what did
not fit the memory a hatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.boxes import Box, add_boxes
from gpipe_bench.figures.lines import Line, add_legend, add_lines
from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.points import Point, Series, points_of, series_of
from gpipe_bench.figures.style import FAINT, INK, WIDTH_IN, draw
from gpipe_bench.figures.tables import read_rows
from gpipe_bench.figures.text import significant
from gpipe_bench.results.rows import Row

_LEFT_IN: Final = 0.42
_RIGHT_IN: Final = 0.08
_ROW_IN: Final = 0.125
# Of maps with many rows, so that six of them fit in a column of a page.
_LOW_ROW_IN: Final = 0.11
_MANY_ROWS: Final = 7
_TITLE_IN: Final = 0.15
_TOP_IN: Final = 0.15
_GAP_IN: Final = 0.04
_AXIS_IN: Final = 0.34
_MAP: Final = "cividis"
_DARK: Final = 0.45
_WORDS: Final = {"oom": "out of memory"}


def draw_sweep(rows_csv: Path, out_stem: Path) -> list[Path]:
    """Draw the sweep held in a result table.

    Args:
        rows_csv: rows with the columns of :class:`gpipe_bench.results.rows.Row`.
        out_stem: path of the figure without its suffix.

    Returns:
        The paths written: SVG, PDF, PNG.

    Raises:
        ConfigError: the table cannot be read, lacks a column, or has the variants of one setting.
        OutputError: the figure cannot be written.
    """
    rows = read_rows(rows_csv)
    _check_cells(rows, rows_csv)
    return draw(sweep_figure, rows, out_stem)


def _check_cells(rows: Sequence[Row], rows_csv: Path) -> None:
    cells = [
        {(row.partitions, row.chunks, row.batch_size, row.checkpoint) for row in one} for one in sweep_groups(rows)
    ]
    if len(cells) > 1 and max(map(len, cells)) == 1:
        rule = f"rows of {rows_csv} must have several partitions, chunks or batches for a variant"
        raise ConfigError([f"{rule}, got one for each of {len(cells)} variants; draw the ablation of them"])


def sweep_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one model on one kind of machine each; published rows are no part of a sweep."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.evidence != "published":
            key = (row.evidence, row.model, row.model_args, row.variant, row.profile or row.device)
            found.setdefault(key, []).append(row)
    return list(found.values())


def sweep_figure(rows: Sequence[Row]) -> Figure:
    """The figure of some rows, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page()
    groups = sweep_groups(rows)
    for k, group in enumerate(groups):
        if k:
            page.space(0.16)
        head = group[0]
        if head.evidence == "emulated" and (twin := _simulated_twin(head, groups)):
            _add_emulated(page, group, twin)
            continue
        page.heading(f"{head.model}: throughput over partitions and micro-batches, in samples/s", head.evidence)
        page.paragraph(machine_words(max(group, key=lambda row: row.processes or 1)), colour=FAINT)
        for series in series_of(points_of(group)):
            page.space(0.06)
            _add_series(page, series)
    page.space(0.02)
    failures = dict.fromkeys(row.status for row in rows if row.status != "ok")
    hatched = f" Hatched: {', '.join(_WORDS.get(status, status) for status in failures)}." if failures else ""
    shared = ", the same in each group of maps" if len({row.checkpoint for row in rows}) > 1 else ""
    page.paragraph(f"Frame: the best.{hatched} Colours go with the logarithm{shared}.", colour=FAINT)
    return page.render()


def _simulated_twin(head: Row, groups: Sequence[Sequence[Row]]) -> Sequence[Row]:
    """The simulated cells of the sweep that a row is of; none if there are none."""
    same = ("model", "model_args", "variant", "profile")
    twins = [group for group in groups if group[0].evidence == "simulated"]
    return next((one for one in twins if all(getattr(one[0], name) == getattr(head, name) for name in same)), ())


def _add_emulated(page: Page, group: Sequence[Row], twin: Sequence[Row]) -> None:
    """Emulated cells, few of the sweep, each beside its simulated one."""
    simulated = {_cell(point): point for point in points_of(twin)}
    points, lines = points_of(group), []
    batches = {point.batch for point in points}
    for point in points:
        both = {"simulated": simulated.get(_cell(point)), "emulated": point}
        known = {kind: one.throughput for kind, one in both.items() if one and one.throughput}
        failures = {kind: one.row.status for kind, one in both.items() if one and not one.throughput}
        n, chunks, batch, mode = _cell(point)
        size = f"n={n} m={chunks}" if len(batches) == 1 else f"n={n} b={batch}\nm={chunks}"
        lines.append(Line(f"{size}\n{mode}", known, failures))
    page.heading(f"{group[0].model}: cells of the sweep that are emulated, too", "simulated", "emulated")
    of = f"; batch {min(batches)}" if len(batches) == 1 else ""
    page.paragraph(f"{machine_words(group[0])}{of}", colour=FAINT)
    page.space(0.05)
    height_in = 0.27 if len(batches) == 1 else 0.4
    add_lines(page, lines, "throughput (samples/s)", ("emulated", "simulated"), height_in=height_in)
    add_legend(page, ["simulated", "emulated"])
    letters = "n: partitions, m: micro-batches" + ("" if len(batches) == 1 else ", b: batch")
    page.paragraph(f"Right: emulated over simulated, minus 1. {letters}.", colour=FAINT)


def _cell(point: Point) -> tuple[int, int, int, str]:
    return point.n, point.chunks, point.batch, point.row.checkpoint


def machine_words(row: Row) -> str:
    """Arguments of the model, machine and components of a sweep, in words."""
    device = row.device or row.profile
    places = f"all on one {device}" if device.startswith("cpu") else f"up to one {device} per partition"
    if (row.processes or 1) > 1:
        places = f"a process for each device, on {row.hosts} host{'s' if row.hosts != 1 else ''} with {device}"
    schedule = "" if row.schedule == "gpipe" else row.schedule
    parts = [row.model_args.replace(";", ", "), places, row.variant, schedule]
    return "; ".join(filter(None, parts))


def _add_series(page: Page, series: Series) -> None:
    every = [point for points in series.points.values() for point in points]
    numbers = sorted({point.n for point in every})
    chunks = sorted({point.chunks for point in every})
    values = [point.throughput for point in every if point.throughput]
    best = max(values, default=0.0)
    norm = LogNorm(min(values, default=0.5) * 0.999, best * 1.001 or 1.0)
    height = len(numbers) * (_ROW_IN if len(numbers) < _MANY_ROWS else _LOW_ROW_IN)
    pitch = _TITLE_IN + height + _GAP_IN
    last = len(series.points) - 1

    def maps(frame: Frame) -> None:
        frame.text(0.06, 0.0, f"Fixed {series.title}", fontweight="bold")
        for k, (mode, points) in enumerate(series.points.items()):
            top = _TOP_IN + k * pitch
            frame.text(_LEFT_IN, top + 0.02, f"checkpoint {mode}")
            axes = frame.axes(_LEFT_IN, WIDTH_IN - _LEFT_IN - _RIGHT_IN, top + _TITLE_IN, height)
            _draw_map(axes, points, (numbers, chunks), norm, best)
            axes.set_yticks(range(len(numbers)), [str(n) for n in numbers])
            axes.set_xticks(range(len(chunks)), [str(m) for m in chunks] if k == last else [])
            axes.set_ylabel("partitions")
            if k == last:
                axes.set_xlabel("micro-batches (chunks)")

    page.strip(_TOP_IN + (last + 1) * pitch + _AXIS_IN, maps)


def _draw_map(
    axes: Axes, points: Sequence[Point], labels: tuple[Sequence[int], Sequence[int]], norm: LogNorm, best: float
) -> None:
    numbers, chunks = labels
    axes.set(xlim=(-0.5, len(chunks) - 0.5), ylim=(len(numbers) - 0.5, -0.5))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    colours = colormaps[_MAP]
    places = [(chunks.index(point.chunks), numbers.index(point.n), point) for point in points]
    failed: list[Box] = [(x - 0.5, y - 0.5, 1.0, 1.0) for x, y, point in places if point.throughput is None]
    add_boxes(axes, failed, facecolor="white", edgecolor="#BBBBBB", hatch="//////", linewidth=0)
    for x, y, point in places:
        if point.throughput is None:
            continue
        shade = float(norm(point.throughput))
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colours(shade), linewidth=0))
        ink = "white" if shade < _DARK else INK
        axes.text(x, y, _short(point.throughput), ha="center", va="center_baseline", color=ink)
        if point.throughput == best:
            axes.add_patch(
                Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="none", edgecolor="#D55E00", linewidth=1.6, zorder=4)
            )


def _short(value: float) -> str:
    """At most four letters."""
    return f"{value / 1000:.1f}k" if value >= 1000 else significant(value)
