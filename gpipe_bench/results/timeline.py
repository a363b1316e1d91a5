"""Timeline events: what ran when, on which device and stream, measured and simulated alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from gpipe_bench.results.perfetto import Slice, perfetto_trace
from gpipe_bench.results.rows import Row
from gpipe_bench.schedules.table import placement
from gpipe_bench.util.files import json_text, write_files

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
        return {name: getattr(self, name) for name in self.__slots__}


_COPIES: Final = dict(zip(COPY_KINDS, ("copies in", "gradients out", "skips in", "skip gradients out"), strict=True))
_ON_COMPUTE: Final = " (compute stream)"
_TRACKS: Final = ("compute", *_COPIES.values(), *(track + _ON_COMPUTE for track in _COPIES.values()))


def chrome_trace(events: Iterable[TimelineEvent], *, title: str, metadata: dict[str, str]) -> dict[str, Any]:
    """A Chrome trace that Perfetto opens: a group per partition, a track for its computation and for each kind of copy.

    Args:
        events: the events of one step.
        title: shown as the name of the trace.
        metadata: plain facts (evidence, variant, model, device) shown with the trace.
    """
    members: dict[int, list[TimelineEvent]] = {}
    for event in events:
        members.setdefault(event.partition, []).append(event)
    return perfetto_trace(
        (_slice(event) for own in members.values() for event in own),
        processes={j: f"partition {j} on {computing_devices(own)}" for j, own in sorted(members.items())},
        tracks=_TRACKS,
        facts={"title": title, **metadata},
    )


def computing_devices(events: Sequence[TimelineEvent]) -> str:
    """Where a partition computes: its copies run on the devices that send."""
    computing = [event for event in events if event.kind in COMPUTE_KINDS]
    return ", ".join(sorted({event.device for event in computing or events}))


def _slice(event: TimelineEvent) -> Slice:
    track = "compute"
    if event.kind in _COPIES:
        track = _COPIES[event.kind] + _ON_COMPUTE * (event.stream == "compute")
    return Slice(
        process=event.partition,
        track=track,
        name=f"{event.kind} ({event.microbatch},{event.partition})",
        category=event.kind,
        start_us=event.start_us,
        end_us=event.end_us,
        facts={
            "microbatch": event.microbatch,
            "partition": event.partition,
            "device": event.device,
            "issue_us": event.issue_us,
            "bytes": event.bytes,
        },
    )


def write_trace(out: Path, variant: str, row: Row, events: Iterable[TimelineEvent], remark: str = "") -> None:
    """Write one step of one run as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    Args:
        out: the JSON file.
        variant: label of the components.
        row: the run that is shown.
        events: its events; none when nothing was recorded.
        remark: why nothing was recorded.

    Raises:
        OutputError: the file cannot be written.
    """
    title = f"{row.model} {variant} ({row.evidence})"
    facts = {
        "evidence": row.evidence,
        "variant": row.variant,
        "model": f"{row.model} {row.model_args}",
        "device": row.device,
        "repeat": str(row.repeat),
        "processes": f"{row.processes} on {row.hosts} hosts" if row.processes != 1 else "",
        # A measured timeline is of another step than those that were timed.
        "step_time_ms": "" if row.evidence == "measured" or row.step_time_ms is None else str(row.step_time_ms),
        "clock_error_us": "" if row.clock_error_us is None else f"{row.clock_error_us:.1f}",
        "remark": remark,
        "placement": _placement(row),
    }
    metadata = {name: text for name, text in facts.items() if text}
    trace = chrome_trace(events, title=f"{title}: {remark}" if remark else title, metadata=metadata)
    write_files({out: json_text(trace)})


def _placement(row: Row) -> str:
    """For each partition its device of the schedule, where devices of a schedule are threads that share a real one."""
    if row.evidence != "measured" or not row.partitions:
        return ""
    return "-".join(map(str, placement(None if row.backward == "autograd" else row.schedule, row.partitions)))
