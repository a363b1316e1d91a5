"""Timeline events: what ran when, on which device and stream, measured and simulated alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

__all__ = ["COMPUTE_KINDS", "COPY_KINDS", "KINDS", "TimelineEvent", "chrome_trace"]

COMPUTE_KINDS: Final = ("forward", "recompute", "backward")
COPY_KINDS: Final = ("copy", "copy_grad", "portal", "portal_grad")
KINDS: Final = COMPUTE_KINDS + COPY_KINDS


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One task of a pipeline.

    Attributes:
        device: the device that ran it, such as ``cuda:0`` or ``cpu``.
        stream: ``compute`` or ``copy``; a copy on the compute stream says ``compute``.
        kind: one of :data:`KINDS`. A ``copy`` or ``portal`` arrives at ``partition``; its gradient, ``copy_grad`` or
            ``portal_grad``, leaves from there.
        microbatch: i, 0-based.
        partition: j, 0-based.
        issue_us: when the host issued it.
        start_us: when it started to run.
        end_us: when it had run. All three in microseconds on one clock whose zero is the start of the record.
        bytes: bytes moved by a copy; bytes of the result of a forward or recompute; 0 for a backward.
    """

    device: str
    stream: str
    kind: str
    microbatch: int
    partition: int
    issue_us: float
    start_us: float
    end_us: float
    bytes: int

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Names of the fields, in order: the columns of an event table."""
        return tuple(field.name for field in fields(cls))

    def to_dict(self) -> dict[str, Any]:
        """The event as plain data."""
        return asdict(self)


def chrome_trace(events: Iterable[TimelineEvent], *, title: str, metadata: dict[str, str]) -> dict[str, Any]:
    """A Chrome trace that Perfetto opens: a process per partition, a thread per stream.

    Args:
        events: the events of one step.
        title: shown as the name of the trace.
        metadata: plain facts (evidence, variant, model, device) shown with the trace.
    """
    ordered = sorted(events, key=lambda event: (event.start_us, event.partition, event.kind))
    streams: dict[int, list[str]] = {}
    rows: list[dict[str, Any]] = []
    for partition, device in sorted({(event.partition, event.device) for event in ordered}):
        streams[partition] = _streams(ordered, partition)
        name = f"partition {partition} on {device}"
        rows.append({"ph": "M", "name": "process_name", "pid": partition, "args": {"name": name}})
        for thread, stream in enumerate(streams[partition]):
            rows.append({"ph": "M", "name": "thread_name", "pid": partition, "tid": thread, "args": {"name": stream}})
    rows += [_slice(event, streams[event.partition].index(event.stream)) for event in ordered]
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"title": title, **metadata}}


def _slice(event: TimelineEvent, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{event.kind} ({event.microbatch},{event.partition})",
        "cat": event.kind,
        "pid": event.partition,
        "tid": thread,
        "ts": event.start_us,
        "dur": event.end_us - event.start_us,
        "args": {
            "microbatch": event.microbatch,
            "partition": event.partition,
            "device": event.device,
            "issue_us": event.issue_us,
            "bytes": event.bytes,
        },
    }


def _streams(events: Sequence[TimelineEvent], partition: int) -> list[str]:
    present = {event.stream for event in events if event.partition == partition}
    return [stream for stream in ("compute", "copy") if stream in present]
