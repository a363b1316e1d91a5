"""A sweep as maps: throughput over partitions and micro-batches, a map per checkpoint mode and kind of batch.

Every cell shows its number, so that the colour is only a guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.base import PAGE_IN, Figure, Panel, Rows, Selection, heading, note
from gpipe_bench.figures.points import Point, Series, points_of, series_of
from gpipe_bench.figures.style import INK
from gpipe_bench.figures.tables import read_selected
from gpipe_bench.figures.text import significant
from gpipe_bench.results.rows import Row

_ROW_IN: Final = 0.14
_WIDEST: Final = 10_000


def read_sweep(path: Path, selection: Selection) -> list[Row]:
    """Rows of one kind of evidence; refuses the variants of one setting."""
    rows = [row for row in read_selected(path, selection) if row.evidence != "published"]
    groups = sweep_groups(rows)
    cells = [{(row.partitions, row.chunks, row.batch_size, row.checkpoint) for row in group} for group in groups]
    if len(cells) > 1 and max(map(len, cells)) == 1:
        rule = f"rows of {path} must have several partitions, chunks or batches for a variant"
        raise ConfigError([f"{rule}, got one for each of {len(cells)} variants; draw the ablation of them"])
    return rows


def sweep_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one model on one kind of machine each."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = (row.evidence, row.model, row.model_args, row.variant, row.profile or row.device)
        found.setdefault(key, []).append(row)
    return list(found.values())


def machine_words(row: Row) -> str:
    """Arguments of the model, machine and components of a sweep, in words."""
    device = row.device or row.profile
    places = f"all on one {device}" if device.startswith("cpu") else f"up to one {device} per partition"
    if (row.processes or 1) > 1:
        places = f"a process for each device, on {row.hosts} host{'s' if row.hosts != 1 else ''} with {device}"
    schedule = "" if row.schedule == "gpipe" else row.schedule
    parts = [row.model_args.replace(";", ", "), places, row.variant, schedule]
    return "; ".join(filter(None, parts))


def fitting(series: Sequence[Series]) -> list[Series]:
    """The series of which some cell has a value; all where none has."""
    good = [one for one in series if any(p.throughput for points in one.points.values() for p in points)]
    return good or list(series)


def _panels(rows: Sequence[Row], width_in: float) -> Rows:
    found: Rows = []
    for group in sweep_groups(rows):
        head = max(group, key=lambda row: row.processes or 1)
        title = f"{head.model}: throughput over partitions and micro-batches (samples/s)"
        found.append(heading(title, [head.evidence], machine_words(head), width_in))
        for series in fitting(series_of(points_of(group))):
            found += [note(f"Fixed {series.title}", width_in, colour=INK, bold=True), _maps(series)]
    return found


@dataclass(frozen=True, slots=True)
class _Map:
    """One checkpoint mode: its points, and what it shares with the maps beside it."""

    points: Sequence[Point]
    mode: str
    numbers: list[int]
    chunks: list[int]
    norm: LogNorm
    best: float


def _maps(series: Series) -> Sequence[Panel]:
    """A map per checkpoint mode, all with the same axes and colours."""
    every = [point for points in series.points.values() for point in points]
    numbers, chunks = sorted({point.n for point in every}), sorted({point.chunks for point in every})
    values = [point.throughput for point in every if point.throughput]
    norm = LogNorm(min(values, default=0.5) * 0.999, max(values, default=1.0) * 1.001)
    shared = numbers, chunks, norm, max(values, default=0.0)
    return [
        Panel(partial(_draw, first=k == 0), _Map(points, mode, *shared), len(numbers) * _ROW_IN)
        for k, (mode, points) in enumerate(series.points.items())
    ]


def _draw(axes: Axes, shown: _Map, *, first: bool) -> None:
    numbers, chunks = shown.numbers, shown.chunks
    axes.set(xlim=(-0.5, len(chunks) - 0.5), ylim=(len(numbers) - 0.5, -0.5))
    axes.set_title(f"checkpoint {shown.mode}", fontsize="medium", pad=2)
    axes.set_xticks(range(len(chunks)), [str(m) for m in chunks])
    axes.set_yticks(range(len(numbers)), [str(n) for n in numbers] if first else [""] * len(numbers))
    axes.set_xlabel("micro-batches (chunks)")
    axes.set_ylabel("partitions" if first else "")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for point in shown.points:
        x, y = chunks.index(point.chunks), numbers.index(point.n)
        if point.throughput is None:
            axes.text(x, y, "-", ha="center", va="center_baseline")
            continue
        shade = float(shown.norm(point.throughput))
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colormaps["cividis"](shade), linewidth=0))
        ink = _ink(colormaps["cividis"](shade))
        axes.text(x, y, _short(point.throughput), ha="center", va="center_baseline", color=ink)
        if point.throughput == shown.best:
            axes.add_patch(
                Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="none", edgecolor="#D55E00", linewidth=1.6, zorder=4)
            )


def _ink(ground: tuple[float, float, float, float]) -> str:
    """Black or white, whichever has more contrast to a colour (WCAG 2.2, relative luminance)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in ground[:3]]
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "black" if luminance > 0.179 else "white"


def _short(value: float) -> str:
    """At most four letters."""
    return f"{value / 1000:.0f}k" if value >= _WIDEST else significant(value)


SWEEP: Final = Figure(
    name="sweep",
    caption=(
        "Throughput for each number of partitions and micro-batches, a map per checkpoint mode. A frame marks the best "
        "of a row of maps; colours go with the logarithm. A dash: no value, mostly for want of memory."
    ),
    sources=("",),
    read=read_sweep,
    panels=_panels,
    width_in=PAGE_IN,
)
