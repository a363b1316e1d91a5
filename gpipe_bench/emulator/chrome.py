"""A replayed trace as a Chrome trace: a group per device, a track per stream, a slice per kernel or copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpipe_bench.emulator.device_times import started_ns
from gpipe_bench.machine.replay import Replayed
from gpipe_bench.machine.trace import Record
from gpipe_bench.results.perfetto import Slice, perfetto_trace

_NS_PER_US = 1000


def chrome_trace(records: Sequence[Record], replayed: Replayed, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The trace for Perfetto.

    Args:
        records: of the trace.
        replayed: when they ran.
        metadata: plain facts that are shown with the trace.
    """
    times = zip(records, replayed.begin_ns, replayed.end_ns, replayed.host_ns, strict=True)
    streams = {record.queue for record in records if record.kind in ("kernel", "copy")}
    return perfetto_trace(
        (_slice(record, *own) for record, *own in times if record.kind in ("kernel", "copy")),
        processes={device: f"device {device}" for device in sorted({device for device, _ in streams})},
        tracks=[_stream(stream) for stream in sorted({stream for _, stream in streams})],
        facts={"title": "emulated", "evidence": "emulated", **metadata},
    )


def _stream(number: int) -> str:
    return f"stream {number}" if number else "default stream"


def _slice(record: Record, begin: int, end: int, issued: int) -> Slice:
    facts = {"issue_us": issued / _NS_PER_US, "host_thread": record.thread}
    if record.kind == "copy":
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
