"""A replayed trace as a Chrome trace: a process per device, a thread per stream, a slice per kernel or copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpipe_bench.emulator.replay.run import Replayed
from gpipe_bench.emulator.trace import Record
from gpipe_bench.emulator.use import started_ns

_NS_PER_US = 1000


def chrome_trace(records: Sequence[Record], replayed: Replayed, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The trace for Perfetto.

    Args:
        records: of the trace.
        replayed: when they ran.
        metadata: plain facts that are shown with the trace.
    """
    streams = sorted({record.queue for record in records if record.kind in ("kernel", "copy")})
    rows = [_name("process", f"device {device}", device) for device in sorted({device for device, _ in streams})]
    rows += [_name("thread", _stream(stream), device, stream) for device, stream in streams]
    for record, begin, end, issued in zip(records, replayed.begin_ns, replayed.end_ns, replayed.host_ns, strict=True):
        if record.kind in ("kernel", "copy"):
            rows.append(_slice(record, started_ns(record, begin, end), end, issued))
    title = {"title": "emulated", "evidence": "emulated", **metadata}
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": title}


def _stream(number: int) -> str:
    return f"stream {number}" if number else "default stream"


def _name(what: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": {"name": name}}


def _slice(record: Record, begin: int, end: int, issued: int) -> dict[str, Any]:
    facts = {"issue_us": issued / _NS_PER_US, "host_thread": record.thread}
    if record.kind == "copy":
        facts |= {"bytes": record.nbytes, "to_device": record.peer}
    return {
        "ph": "X",
        "name": record.name,
        "cat": record.kind,
        "pid": record.device,
        "tid": record.stream,
        "ts": begin / _NS_PER_US,
        "dur": (end - begin) / _NS_PER_US,
        "args": facts,
    }
