"""Timeline events: what ran when, on which device and stream, measured and simulated alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

COMPUTE_KINDS: Final = ("forward", "recompute", "backward", "backward_inputs", "backward_weights")
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


_TRACKS: Final = ("compute", "copy", "copy on the compute stream")


def chrome_trace(events: Iterable[TimelineEvent], *, title: str, metadata: dict[str, str]) -> dict[str, Any]:
    """A Chrome trace that Perfetto opens: a process per partition, a thread per stream.

    A copy on a compute stream has a thread of its own: it arrives at its partition, but may occupy the stream of the
    device that sends, and slices of one thread must not overlap.

    Args:
        events: the events of one step.
        title: shown as the name of the trace.
        metadata: plain facts (evidence, variant, model, device) shown with the trace.
    """
    ordered = sorted(events, key=lambda event: (event.start_us, event.partition, event.kind))
    tracks: dict[int, list[str]] = {}
    rows: list[dict[str, Any]] = []
    for partition in sorted({event.partition for event in ordered}):
        members = [event for event in ordered if event.partition == partition]
        present = {_track(event) for event in members}
        tracks[partition] = [track for track in _TRACKS if track in present]
        rows.append(_name("process", f"partition {partition} on {computing_devices(members)}", partition))
        rows += [_name("thread", track, partition, thread) for thread, track in enumerate(tracks[partition])]
    rows += [_slice(event, tracks[event.partition].index(_track(event))) for event in ordered]
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"title": title, **metadata}}


def _track(event: TimelineEvent) -> str:
    return _TRACKS[2] if event.kind in COPY_KINDS and event.stream == _TRACKS[0] else event.stream


def computing_devices(events: Sequence[TimelineEvent]) -> str:
    """Where a partition computes: its copies run on the devices that send."""
    computing = [event for event in events if event.kind in COMPUTE_KINDS]
    return ", ".join(sorted({event.device for event in computing or events}))


def _name(what: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": {"name": name}}


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
