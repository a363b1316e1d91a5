"""Invented tables for the tests of figures: nothing here was ever run or published."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpipe_bench.components import Components
from gpipe_bench.results.rows import Row
from gpipe_bench.results.timeline import TimelineEvent
from gpipe_bench.schedules.cycles import checkpoint_stop, clock_cycles

EVENT_COLUMNS = ("cell", "variant", "repeat", "evidence", *TimelineEvent.columns())
NO_COPY_STREAMS = "copy_streams needs an accelerator; on cpu it changes nothing, see variant {}"


def write_csv(path: Path, columns: Iterable[str], records: Iterable[Mapping[str, Any]]) -> Path:
    """Write records as CSV and return the path."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(records)
    return path


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    """Write rows with all columns of the schema."""
    return write_csv(path, Row.columns(), (row.to_dict() for row in rows))


def ablation_row(variant: str, repeat: int | None = 0, **changes: Any) -> Row:
    """One row with invented settings; ``changes`` replaces any of its columns."""
    components = Components.from_label(variant)
    values: dict[str, Any] = {
        "experiment": "ablation", "model": "testnet", "model_args": "depth=5;B=1;C=8;size=64", "variant": variant,
        "partitions": 4, "chunks": 8, "checkpoint": "except_last", "batch_size": 32, "balance": "3-4-5-6",
        "repeat": repeat, "seed": 0, "device": "cpu Imaginary 9000", "device_count": 1, "profile": "imaginary",
    }  # fmt: skip
    switches = {name: getattr(components, name) for name in Components.switched()}
    return Row(**{**values, **switches, **changes})


def measured(variant: str, repeat: int, speed: float, rng: random.Random, **changes: Any) -> Row:
    """A row that ended well, with an invented throughput that grows with every component."""
    components = Components.from_label(variant)
    on = sum(getattr(components, name) for name in Components.switched())
    throughput = speed * (1 + 0.12 * on + (0.2 if components.fork_join else 0)) * rng.gauss(1, 0.025)
    values = {"throughput_samples_per_s": throughput, "step_time_ms": 32000 / throughput}
    return ablation_row(variant, repeat, **{**values, **changes})


def cpu_ablation(repeats: int = 3) -> list[Row]:
    """The factorial on an invented CPU: without copy streams measured, with them unsupported; one oom and one error."""
    rng, rows = random.Random(1), []
    for components in Components.factorial():
        variant = components.label
        if components.copy_streams:
            instead = Components.from_label(variant)
            reason = NO_COPY_STREAMS.format(f"{instead.label} without str")
            rows += [
                ablation_row(variant, k, status="unsupported", reason=reason, device="cpu") for k in range(repeats)
            ]
            continue
        memory = 0.02 + 0.01 * (not components.fork_join) + 0.004 * (not components.portals)
        for k in range(repeats):
            if variant == "x-x-ptl-x-x":
                rows.append(
                    ablation_row(variant, k, status="oom", reason="needed 3.1 GiB of 2.0 GiB; lower batch_size")
                )
            elif variant == "dep-x-x-x-x" and k == 1:
                rows.append(ablation_row(variant, k, status="error", reason="RuntimeError: worker of partition 2 died"))
            else:
                rows.append(measured(variant, k, 40, rng, peak_allocated_gib=memory * rng.gauss(1, 0.01)))
    return rows


def cpu_ways(repeats: int = 3) -> list[Row]:
    """Ways to run a model on an invented CPU: the loops, two speeds of pipelines, and a schedule that failed."""
    rows = []
    speeds = {"paper": 150, "loop": 100, "microbatches": 90, "gpipe": 150, "1f1b": 180, "zb_v": None}
    for way, speed in speeds.items():
        values: dict[str, Any] = {"checkpoint": "never", "partitions": 2, "balance": "9-9"}
        if way == "loop":
            values |= {"partitions": 1, "chunks": 1, "balance": "18"}
        elif way == "microbatches":
            values |= {"partitions": 1, "balance": "18"}
        elif way != "paper":
            values |= {"backward": "scheduled", "schedule": way}
        for k in range(repeats):
            found = {"throughput_samples_per_s": speed + (k - 1), "peak_allocated_gib": 0.125} if speed else {}
            failed = {} if speed else {"status": "error", "reason": "RuntimeError: a worker died"}
            rows.append(ablation_row("dep-x-ptl", k, **values, **found, **failed))
    return rows


def accelerator_ablation(repeats: int = 3, evidence: str = "measured") -> list[Row]:
    """The whole factorial on an invented accelerator."""
    rng, rows = random.Random(2), []
    where = {"device": "cuda Imaginary H9", "device_count": 4, "profile": "h9", "evidence": evidence, "batch_size": 128}
    for components in Components.factorial():
        for k in range(repeats):
            memory = {
                "peak_reserved_gib": 20 + 8 * (not components.fork_join) + rng.random(),
                "peak_allocated_gib": 18.0,
            }
            rows.append(measured(components.label, k, 900, rng, **where, **memory))
    return rows


def published_ablation() -> list[Row]:
    """Four invented values in the form of a printed table: no repeats, no factorial."""
    values = {"baseline": (31, 50), "dep-x-x": (40, 20), "dep-str-x": (56, 31), "dep-str-ptl": (59, 23)}
    return [
        ablation_row(
            variant, evidence="published", throughput_samples_per_s=speed, peak_reserved_gib=memory, repeat=None
        )
        for variant, (speed, memory) in values.items()
    ]


# kind: (start and length in units of a forward pass, stream), within a clock-cycle of the forward or backward half.
_FORWARD = {"forward": (0.0, 0.9, "compute"), "copy": (-0.25, 0.2, "copy"), "portal": (-0.45, 0.15, "copy")}
_BACKWARD = {
    "recompute": (0.0, 0.8, "compute"),
    "backward": (0.8, 1.7, "compute"),
    "copy_grad": (2.55, 0.2, "copy"),
    "portal_grad": (2.75, 0.2, "copy"),
}


def step_events(m: int, n: int, *, copies: bool, device: str = "cpu", unit_us: float = 1000.0) -> list[TimelineEvent]:
    """An idealised step of a pipeline: clock-cycles forward, reversed backward, recomputation but for the last one."""
    cycles = list(clock_cycles(m, n))
    halves = [(1.2 * k, cycle, _FORWARD) for k, cycle in enumerate(cycles)]
    zero = 1.2 * len(cycles)
    halves += [(zero + 3 * k, cycle, _BACKWARD) for k, cycle in enumerate(reversed(cycles))]
    events = []
    for start, cycle, kinds in halves:
        for i, j in cycle:
            for kind, (shift, length, stream) in kinds.items():
                if _happens(kind, i, j, m, n) and (copies or stream == "compute"):
                    place = f"{device}:{j}" if device == "cuda" else device
                    begin = (start + shift) * unit_us
                    end = begin + length * unit_us
                    events.append(TimelineEvent(place, stream, kind, i, j, begin, begin, end, 4096))
    return events


def _happens(kind: str, i: int, j: int, m: int, n: int) -> bool:
    if kind == "recompute":
        return i < checkpoint_stop("except_last", m)
    if kind.startswith("portal"):
        return j == n - 1
    return j > 0 or not kind.startswith("copy")


def overlapping_events(m: int, n: int) -> list[TimelineEvent]:
    """A step on one invented CPU whose backward passes interleave and whose copies run on the compute stream."""
    rng = random.Random(3)
    events = []
    for event in step_events(m, n, copies=True):
        longer = event.end_us + (rng.uniform(0, 900) if event.kind == "backward" else 0)
        events.append(TimelineEvent(event.device, "compute", event.kind, event.microbatch, event.partition,
                                    event.issue_us, event.start_us, longer, event.bytes))  # fmt: skip
    return events


def event_records(
    events: Iterable[TimelineEvent],
    variant: str,
    repeat: int = 0,
    cell: str = "testnet-cell",
    evidence: str = "measured",
) -> list[dict[str, Any]]:
    """Events as the lines of an event table."""
    key = {"cell": cell, "variant": variant, "repeat": repeat, "evidence": evidence}
    return [{**key, **event.to_dict()} for event in events]


def write_events(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write an event table."""
    return write_csv(path, EVENT_COLUMNS, records)
