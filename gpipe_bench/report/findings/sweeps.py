"""Findings of sweeps and of advice: the fastest pipeline, and what stops a larger one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final

from gpipe_bench.figures.points import SHARES, Point, Series, points_of, series_of
from gpipe_bench.figures.sweep import sweep_groups
from gpipe_bench.figures.text import significant
from gpipe_bench.report.findings.finding import NBSP, Finding, machine, model_words, percent, plural, share
from gpipe_bench.results.rows import Row
from gpipe_bench.schedules.cycles import ideal_bubble

_CLEAR: Final = 0.05
"""Share of the device time from which on a growing part of it is named."""


def sweep_findings(rows: Sequence[Row], section: str) -> Iterator[Finding]:
    """A finding per model and machine: the fastest of the batch with the most cells, and why its neighbours are not."""
    for group in sweep_groups(rows):
        # A few cells are emulated, too: the fastest of them says nothing.
        if group[0].evidence == "emulated":
            continue
        series = [one for one in series_of(points_of(group)) if _good(one)]
        if not series:
            continue
        # Of a fixed batch more chunks make smaller micro-batches: that has an optimum. A fixed micro-batch has none.
        chosen = max(series, key=lambda one: (one.fixed == "batch", len(_good(one))))
        best = max(_good(chosen), key=lambda point: point.throughput or 0.0)
        where = f"{model_words(group[0])}; {_where(group[0])}; {chosen.title}"
        yield Finding("Sweep", (group[0].evidence,), where, tuple(_sentences(chosen, best)), section)


def advice_findings(rows: Sequence[Row], section: str) -> Iterator[Finding]:
    """A finding per model and machine: the fastest pipeline that fits, of how many."""
    for group in sweep_groups(rows):
        points = points_of(group)
        good = [point for point in points if point.throughput]
        if not good:
            continue
        best = max(good, key=lambda point: point.throughput or 0.0)
        where = f"{model_words(group[0])}; {_where(group[0])}; batch of {best.batch} samples"
        memory = best.row.peak_reserved_gib or best.row.peak_allocated_gib
        room = f" It takes {significant(memory)}{NBSP}GiB on all devices together." if memory else ""
        sentences = (
            f"The fastest that fits the memory is {_pipeline(best)}: {_speed(best)}.{room}",
            f"Of {plural(len(points), 'pipeline')} that were simulated, {len(good)} fit.",
            _idle_words(best),
        )
        yield Finding("Advice", (group[0].evidence,), where, sentences, section)


def _good(series: Series) -> list[Point]:
    return [point for points in series.points.values() for point in points if point.throughput]


def _where(row: Row) -> str:
    """The machine: how many devices differs from cell to cell."""
    name = row.device or row.profile
    return f"all on one {name}" if name.startswith("cpu") else f"one {name} per partition" if name else machine(row)


def _sentences(series: Series, best: Point) -> Iterator[str]:
    yield f"The fastest is {_pipeline(best)}: {_speed(best)}."
    yield _idle_words(best)
    points = series.points[best.row.checkpoint]
    for name, attribute, fixed in (("partitions", "n", "chunks"), ("chunks", "chunks", "n")):
        size = attrgetter(attribute)
        line = sorted((p for p in points if getattr(p, fixed) == getattr(best, fixed)), key=size)
        more, fewer = ([p for p in line if size(p) > size(best)], [p for p in line if size(p) < size(best)])
        if more:
            yield _step(name, size(more[0]), best, more[0])
        elif fewer:
            yield f"More {name} were not tried. {_step(name, size(fewer[-1]), best, fewer[-1])}"


def _step(name: str, count: int, best: Point, other: Point) -> str:
    """What the next number of partitions or chunks gives, and which parts of device time grow with it."""
    words = f"{count}{NBSP}{name if count > 1 else name.removesuffix('s')}"
    if not other.throughput:
        status = other.row.status
        return f"With {words} it {'runs out of memory' if status == 'oom' else f'has no value ({status})'}."
    change = percent(other.throughput / (best.throughput or 1.0))
    what = f"With {words}, throughput changes by {change} to {_speed(other)}."
    ends = sorted((best, other), key=lambda point: (point.n, point.chunks))
    small, large = ({part: point.shares[part] * point.device_ms for part in SHARES} for point in ends)
    grown = sorted(((large[part] - small[part], part) for part in SHARES), reverse=True)
    parts = [f"{part} {significant(value)}{NBSP}ms" for value, part in grown if value > _CLEAR * ends[0].device_ms]
    if not parts:
        return what
    total = f"{significant(ends[0].device_ms)} to {significant(ends[1].device_ms)}{NBSP}ms"
    return f"{what} From fewer to more, device time per sample goes from {total}; more is spent on {', '.join(parts)}."


def _speed(point: Point) -> str:
    return f"{significant(point.throughput or 0.0)}{NBSP}samples/s"


def _pipeline(point: Point) -> str:
    mode = point.row.checkpoint
    return f"{plural(point.n, 'partition')} with {plural(point.chunks, 'chunk')}, checkpoint {mode}"


def _idle_words(point: Point) -> str:
    bubble, imbalance = point.shares["bubble"], point.shares["imbalance"]
    ideal = share(ideal_bubble(point.row.microbatches or point.chunks, point.n))
    return (
        f"Its devices idle {share(bubble + imbalance)} of the time: bubble {share(bubble)} (ideal bubble for these "
        f"numbers: {ideal}), imbalance {share(imbalance)}."
    )
