"""A sweep as maps: throughput and memory over partitions and micro-batches, per checkpoint mode and kind of batch.

Every cell shows its number, so that the colour is only a guide. Partitions and micro-batches of which no cell has a
value are left out and named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Final

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.base import PAGE_IN, Figure, Panel, Rows, Selection, heading, note
from gpipe_bench.figures.points import Point, Series, points_of, series_of
from gpipe_bench.figures.style import INK, OKABE_ITO
from gpipe_bench.figures.tables import read_selected
from gpipe_bench.figures.text import NAIVE, listing, significant
from gpipe_bench.results.labels import training_words
from gpipe_bench.results.rows import Row
from gpipe_bench.schedules.table import TWO_PER_DEVICE

_ROW_IN: Final = 0.125
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
    """Rows of one model on one kind of machine each, all run and trained in the same way."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        machine = row.evidence, row.model, row.model_args, row.variant, row.profile or row.device
        run = row.schedule, row.backward, row.transfer, row.flavour, training_words(row)
        found.setdefault((*machine, *run), []).append(row)
    return list(found.values())


def machine_words(row: Row) -> str:
    """Arguments of the model, machine, components and schedule of a sweep, in words."""
    device = row.device or row.profile
    places = f"all on one {device}" if device.startswith("cpu") else f"up to one {device} per partition"
    if row.schedule in TWO_PER_DEVICE and not device.startswith("cpu"):
        places = f"up to one {device} per two partitions"
    if (row.processes or 1) > 1:
        places = f"a process for each device, on {row.hosts} host{'s' if row.hosts != 1 else ''} with {device}"
    schedule = "" if row.schedule == "gpipe" and row.backward != "scheduled" else row.schedule
    transfer = "" if row.transfer in ("", "direct") else f"transfer {row.transfer}"
    autograd = "autograd of PyTorch 1.3" if row.flavour == "published" else ""
    more = row.variant, schedule, transfer, training_words(row), autograd
    parts = [row.model_args.replace(";", ", "), places, *more]
    return "; ".join(filter(None, parts))


def fitting(series: Sequence[Series]) -> list[Series]:
    """The series of which some cell has a value; all where none has."""
    good = [one for one in series if any(p.throughput for points in one.points.values() for p in points)]
    return good or list(series)


def _panels(rows: Sequence[Row], width_in: float) -> Rows:
    found: Rows = []
    for group in sweep_groups(rows):
        head = max(group, key=lambda row: row.processes or 1)
        shown = fitting(series_of(points_of(group)))
        found.append(heading(_finding(head.model, shown), [head.evidence], machine_words(head), width_in))
        for series in shown:
            found += [note(f"Fixed {series.title}", width_in, colour=INK, bold=True), *_maps(series)]
            if absent := _absent(series):
                found.append(note(absent, width_in))
    words = "Frame: the fastest cell of its row of maps, and its memory. Memory: reserved by all devices together. "
    words += "A dash: no value; the step does not fit the memory, or did not run."
    naive = f" {NAIVE}" if any(row.chunks == 1 and (row.partitions or 1) > 1 for row in rows) else ""
    return [*found, note(words + naive, width_in)]


def _finding(model: str, shown: Sequence[Series]) -> str:
    """Which cell is the fastest."""
    every = [point for series in shown for points in series.points.values() for point in points]
    best = max(every, key=lambda point: point.throughput or 0.0)
    if not best.throughput:
        return f"{model}: no cell of the sweep has a value"
    where = f"{best.n} partitions, {best.chunks} micro-batches and checkpoint {best.row.checkpoint}"
    memory = f", in {significant(best.memory_gib)}\u00a0GiB" if best.memory_gib else ""
    return f"{model} trains fastest with {where}: {significant(best.throughput)} samples/s{memory}"


@dataclass(frozen=True, slots=True)
class _Quantity:
    """What the numbers of a row of maps are: name, colours, the colour of a frame on them, and the value of a point."""

    name: str
    colours: str
    frame: str
    value: Callable[[Point], float | None]


_QUANTITIES: Final = (
    _Quantity("samples/s", "cividis", OKABE_ITO["vermilion"], attrgetter("throughput")),
    _Quantity("GiB", "YlOrBr", OKABE_ITO["blue"], attrgetter("memory_gib")),
)


@dataclass(frozen=True, slots=True)
class _Map:
    """One quantity in one checkpoint mode: its points, and what it shares with the maps beside it."""

    points: Sequence[Point]
    mode: str
    quantity: _Quantity
    numbers: list[int]
    chunks: list[int]
    norm: LogNorm
    best: Point


def _maps(series: Series) -> Rows:
    """A row of maps for each quantity that is known, in each a map per checkpoint mode, with the same axes."""
    every = [point for points in series.points.values() for point in points]
    numbers, chunks = _places(series)
    best = max(every, key=lambda point: point.throughput or 0.0)
    known = [one for one in _QUANTITIES if any(map(one.value, every))] or [_QUANTITIES[0]]
    rows: Rows = []
    for quantity in known:
        values = [value for value in map(quantity.value, every) if value]
        norm = LogNorm(min(values, default=0.5) * 0.999, max(values, default=1.0) * 1.001)
        shared = quantity, numbers, chunks, norm, best
        draw = partial(_draw, bottom=quantity is known[-1])
        rows.append(
            [
                Panel(partial(draw, first=k == 0), _Map(points, mode, *shared), max(len(numbers) * _ROW_IN, 0.55))
                for k, (mode, points) in enumerate(series.points.items())
            ]
        )
    return rows


def _places(series: Series) -> tuple[list[int], list[int]]:
    """The numbers of partitions and of micro-batches of which a cell has a value; all where none has."""
    every = [point for points in series.points.values() for point in points]
    good = [point for point in every if point.throughput] or every
    return sorted({point.n for point in good}), sorted({point.chunks for point in good})


def _absent(series: Series) -> str:
    """The numbers of partitions and micro-batches that the maps leave out, since no cell of them has a value."""
    every = [point for points in series.points.values() for point in points]
    numbers, chunks = _places(series)
    left = {
        "partitions": sorted({point.n for point in every} - {*numbers}),
        "micro-batches": sorted({point.chunks for point in every} - {*chunks}),
    }
    words = [f"{listing([*map(str, counts)])} {name}" for name, counts in left.items() if counts]
    return f"Not drawn, since no step fits the memory: {'; '.join(words)}." if words else ""


def _draw(axes: Axes, shown: _Map, *, first: bool, bottom: bool) -> None:
    numbers, chunks = shown.numbers, shown.chunks
    axes.set(xlim=(-0.5, len(chunks) - 0.5), ylim=(len(numbers) - 0.5, -0.5))
    axes.set_title(f"{shown.quantity.name}, checkpoint {shown.mode}", fontsize="medium", pad=2)
    axes.set_xticks(range(len(chunks)), [str(m) if bottom else "" for m in chunks])
    axes.set_yticks(range(len(numbers)), [str(n) for n in numbers] if first else [""] * len(numbers))
    axes.set_xlabel("micro-batches (chunks)" if bottom else "")
    axes.set_ylabel("partitions" if first else "")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    colours = colormaps[shown.quantity.colours]
    for point in shown.points:
        if point.n not in numbers or point.chunks not in chunks:
            continue
        x, y, value = chunks.index(point.chunks), numbers.index(point.n), shown.quantity.value(point)
        if not value:
            axes.text(x, y, "-", ha="center", va="center_baseline")
            continue
        ground = colours(float(shown.norm(value)))
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=ground, linewidth=0))
        axes.text(x, y, _short(value), ha="center", va="center_baseline", color=_ink(ground))
        if point is shown.best:
            edge = shown.quantity.frame
            # Around the cell, not into it, where it would touch the number.
            frame = Rectangle(
                (x - 0.54, y - 0.59), 1.08, 1.18, facecolor="none", edgecolor=edge, linewidth=1.6, zorder=4
            )
            axes.add_patch(frame)
            frame.set_clip_on(False)


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
        "Throughput, and below it peak memory of all devices together, for each number of partitions and "
        "micro-batches, a map per checkpoint mode. A frame marks the fastest of a row of maps; colours go with the "
        "logarithm. A dash: no value, mostly for want of memory."
    ),
    sources=("",),
    read=read_sweep,
    panels=_panels,
    width_in=PAGE_IN,
)
