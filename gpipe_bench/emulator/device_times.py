"""What a replayed trace says of its devices: their use by kernels, copies and operators, and a Chrome trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpipe_bench.machine.replay import Replayed
from gpipe_bench.machine.trace import Record
from gpipe_bench.results.breakdown import Interval, covered
from gpipe_bench.results.perfetto import Slice, perfetto_trace

_NS_PER_US: Final = 1000
_WORK: Final = frozenset({"kernel", "copy", "meet"})


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Shares of a window of one device; together 1.

    Attributes:
        kernel_fraction: a kernel runs.
        copy_fraction: a copy that the device sends runs, and no kernel.
        idle_fraction: the rest.
    """

    kernel_fraction: float
    copy_fraction: float
    idle_fraction: float


def device_times(
    records: Sequence[Record], begin_ns: Sequence[int], end_ns: Sequence[int], window: tuple[int, int], devices: int
) -> list[DeviceTime]:
    """The use of each device.

    Args:
        records: of a trace.
        begin_ns: when each began.
        end_ns: when each had ended.
        window: begin and end, in nanoseconds.
        devices: how many there are.
    """
    kernels: defaultdict[int, list[Interval]] = defaultdict(list)
    all_work: defaultdict[int, list[Interval]] = defaultdict(list)
    for record, span in _inside(records, begin_ns, end_ns, window):
        all_work[record.device].append(span)
        if record.kind == "kernel":
            kernels[record.device].append(span)
    length = window[1] - window[0]
    times = []
    for device in range(devices):
        computing, working = covered(kernels[device]) / length, covered(all_work[device]) / length
        times.append(DeviceTime(computing, working - computing, 1 - working))
    return times


def operator_times(
    records: Sequence[Record], begin_ns: Sequence[int], end_ns: Sequence[int], window: tuple[int, int]
) -> list[tuple[str, float, int]]:
    """Operators and kinds of copies: name, milliseconds on all devices together, kernels; the longest first."""
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for record, (begin, end) in _inside(records, begin_ns, end_ns, window):
        spent[record.name] += round(end - begin)
        count[record.name] += 1
    return [(name, time / 1e6, count[name]) for name, time in spent.most_common()]


def started_ns(record: Record, begin: int, end: int) -> int:
    """When a kernel ran at the earliest: one that is shorter than its launch waits for the end of the launch."""
    if record.kind != "kernel" or record.duration is None:
        return begin
    return max(begin, end - round(record.duration * 1e6))


def _inside(
    records: Sequence[Record], begin_ns: Sequence[int], end_ns: Sequence[int], window: tuple[int, int]
) -> list[tuple[Record, Interval]]:
    """Kernels and copies that run in the window, and the part of their time that lies in it."""
    found: list[tuple[Record, Interval]] = []
    for record, begin, end in zip(records, begin_ns, end_ns, strict=True):
        span = max(started_ns(record, begin, end), window[0]), min(end, window[1])
        if record.kind in _WORK and span[0] < span[1]:
            found.append((record, span))
    return found


def chrome_trace(records: Sequence[Record], replayed: Replayed, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The trace for Perfetto: a group per device, a track per stream, a slice per kernel or copy.

    Args:
        records: of the trace.
        replayed: when they ran.
        metadata: plain facts that are shown with the trace.
    """
    times = zip(records, replayed.begin_ns, replayed.end_ns, replayed.host_ns, strict=True)
    streams = {record.queue for record in records if record.kind in _WORK}
    return perfetto_trace(
        (_slice(record, *own) for record, *own in times if record.kind in _WORK),
        processes={device: f"device {device}" for device in sorted({device for device, _ in streams})},
        tracks=[_stream(stream) for stream in sorted({stream for _, stream in streams})],
        facts={"title": "emulated", "evidence": "emulated", **metadata},
    )


def _stream(number: int) -> str:
    return f"stream {number}" if number else "default stream"


def _slice(record: Record, begin: int, end: int, issued: int) -> Slice:
    facts = {"issue_us": issued / _NS_PER_US, "host_thread": record.thread}
    if record.kind != "kernel":
        facts |= {"bytes": record.nbytes, "to_device": record.peer}
    return Slice(
        process=record.device,
        track=_stream(record.stream),
        name=record.name,
        category=record.kind,
        start_us=started_ns(record, begin, end) / _NS_PER_US,
        end_us=end / _NS_PER_US,
        facts=facts,
    )
