"""The cells of a sweep as points: partitions, micro-batches, batch, checkpoint mode, and what came of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Final

from gpipe_bench.results.rows import Row
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from gpipe_bench.schedules.table import device_count, is_schedule_file

SHARES: Final = ("compute", "recompute", "copy", "imbalance", "bubble")
"""Parts of a device's time, which add up to all of it."""

_cell = attrgetter("partitions", "chunks", "batch_size", "checkpoint", "balance", "schedule", "backward")


@dataclass(frozen=True, slots=True)
class Point:
    """One cell: medians over its repeats.

    Attributes:
        row: the first of its rows that ended well, or else the first.
        throughput: in samples per second; None where no run ended well.
        device_ms: device time per sample, in milliseconds: devices times step time over batch size.
        memory_gib: peak memory of all devices together, in GiB: reserved, or live tensors where that is not known.
        shares: part of that for each of :data:`SHARES`; together 1.
    """

    row: Row
    throughput: float | None
    device_ms: float
    shares: dict[str, float]
    memory_gib: float | None = None

    @property
    def n(self) -> int:
        """Partitions."""
        return self.row.partitions or 1

    @property
    def devices(self) -> int:
        """Devices that share the partitions."""
        return _devices(self.row)

    @property
    def chunks(self) -> int:
        """Micro-batches asked for."""
        return self.row.chunks or 1

    @property
    def batch(self) -> int:
        """Samples per step."""
        return self.row.batch_size or 1

    @property
    def ideal_ms(self) -> float | None:
        """Device time per sample with the ideal bubble, balanced and with free copies; None if it has no formula."""
        busy = (self.shares["compute"] + self.shares["recompute"]) * self.device_ms
        bubble = self.row.ideal_bubble
        return None if bubble is None else busy / (1 - bubble)


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind of batch.

    Attributes:
        fixed: ``batch`` or ``micro-batch``.
        size: the samples that it has.
        points: by checkpoint mode, in the order of the modes.
    """

    fixed: str
    size: int
    points: dict[str, list[Point]]

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.fixed} of {self.size} samples"


def points_of(rows: Iterable[Row]) -> list[Point]:
    """A point per cell, in the order of the rows."""
    cells: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault(_cell(row), []).append(row)
    return [_point(cell) for cell in cells.values()]


def _point(cell: Sequence[Row]) -> Point:
    good = [row for row in cell if row.status == "ok" and row.throughput_samples_per_s and row.step_time_ms]
    if not good:
        return Point(cell[0], None, 0.0, dict.fromkeys(SHARES, 0.0))
    head = good[0]
    known = {name: median(getattr(row, f"{name}_fraction") or 0.0 for row in good) for name in SHARES[1:]}
    device_ms = _devices(head) * median(row.step_time_ms or 0.0 for row in good) / (head.batch_size or 1)
    throughput = median(row.throughput_samples_per_s or 0.0 for row in good)
    memory = [value for row in good for value in [row.peak_reserved_gib or row.peak_allocated_gib] if value]
    shares = {"compute": max(0.0, 1 - sum(known.values())), **known}
    return Point(head, throughput, device_ms, shares, median(memory) if memory else None)


def _devices(row: Row) -> int:
    """Devices of a row. A CPU has as many as the schedule, which may put two partitions on each."""
    if row.device_count and not row.device.startswith("cpu"):
        return row.device_count
    return (row.partitions or 1) if is_schedule_file(row.schedule) else device_count(row.schedule, row.partitions or 1)


def series_of(points: Sequence[Point]) -> list[Series]:
    """The series of a sweep: every batch, and every micro-batch, that occurs with several numbers of chunks."""
    batches = Counter(size for size, _ in {(p.batch, p.chunks) for p in points})
    per_chunk = Counter(b / c for b, c in {(p.batch, p.chunks) for p in points})
    several = len({p.chunks for p in points}) > 1
    sizes = sorted(size for size, count in batches.items() if count > 1 or not several)
    ratios = sorted(ratio for ratio, count in per_chunk.items() if count > 1)
    return [
        *(Series("batch", size, _modes([p for p in points if p.batch == size])) for size in sizes),
        *(Series("micro-batch", int(r), _modes([p for p in points if p.batch / p.chunks == r])) for r in ratios),
    ]


def _modes(points: Sequence[Point]) -> dict[str, list[Point]]:
    modes = [mode for mode in CHECKPOINT_MODES if any(p.row.checkpoint == mode for p in points)]
    return {mode: [p for p in points if p.row.checkpoint == mode] for mode in modes}
