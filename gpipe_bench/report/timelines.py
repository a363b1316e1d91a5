"""Recorded steps as data of the interactive timeline: lanes, boxes, and what to say of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gpipe_bench.components import PUBLISHED
from gpipe_bench.figures.chart import KIND_COLOURS
from gpipe_bench.figures.groups import setting_words
from gpipe_bench.figures.lanes import lane_keys, stack
from gpipe_bench.figures.runs import Run, choose_run
from gpipe_bench.figures.tables import RecordedEvent
from gpipe_bench.results.rows import EVIDENCE, Row
from gpipe_bench.results.timeline import KINDS, TimelineEvent, computing_devices

EVENT_FIELDS: Final = (
    *("lane", "kind", "microbatch", "partition", "start_us", "end_us", "issue_us", "bytes", "device"),
    *("track", "tracks"),
)
"""What the numbers of an event are, in order; ``kind`` and ``device`` are indices."""

_LETTERS: Final = {
    "forward": "F",
    "recompute": "R",
    "backward": "B",
    "backward_inputs": "I",
    "backward_weights": "W",
    "copy": "C",
    "copy_grad": "c",
    "portal": "P",
    "portal_grad": "p",
}


def kinds() -> list[dict[str, str]]:
    """Name, colour and letter of every kind of task, in the order of their indices."""
    return [{"name": kind, "colour": KIND_COLOURS[kind], "letter": _LETTERS[kind]} for kind in KINDS]


def timeline_set(name: str, events: Sequence[RecordedEvent], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The recorded steps of one experiment: a set per kind of evidence, in each a run per cell.

    Of several repeats the one whose step time is nearest to their median.

    Args:
        name: of the experiment.
        events: of its table of events.
        rows: of its table of rows.

    Raises:
        ConfigError: the rows do not hold a recorded run.
    """
    sets = []
    for evidence in EVIDENCE:
        cells: dict[str, list[RecordedEvent]] = {}
        for record in events:
            if record.evidence == evidence:
                cells.setdefault(record.cell, []).append(record)
        runs = [_run(records, rows) for records in cells.values()]
        if runs:
            runs.sort(key=_order)
            _name_apart(runs)
            sets.append({"name": f"{name}, {evidence}", "evidence": evidence, "runs": runs})
    return sets


def _run(records: Sequence[RecordedEvent], rows: Sequence[Row]) -> dict[str, Any]:
    head = records[0]
    own = [row for row in rows if row.cell == head.cell] or list(rows)
    run = choose_run(records, own, head.variant, head.evidence)
    return {"variant": head.variant, "cell": head.cell, "words": _words(run), **_drawn(run.events)}


def _words(run: Run) -> str:
    row = run.row
    speed = f"; {row.throughput_samples_per_s:.1f} samples/s" if row.throughput_samples_per_s else ""
    repeat = f"; repeat {row.repeat or 0}" if row.evidence == "measured" else ""
    return f"{row.model}; {setting_words(row)}{repeat}{speed}"


def _drawn(events: Sequence[TimelineEvent]) -> dict[str, Any]:
    """Lanes and boxes; time counts from the first task on."""
    zero = min(event.start_us for event in events)
    span = max(event.end_us for event in events) - zero
    keys = lane_keys(events)
    devices = sorted({event.device for event in events})
    boxes = []
    for lane, key in enumerate(keys):
        for box in stack([event for event in events if (event.partition, event.stream) == key], span):
            event = box.event
            times = [round(value - zero, 2) for value in (event.start_us, event.end_us, event.issue_us)]
            ends = [event.bytes, devices.index(event.device), box.track, box.tracks]
            boxes.append([lane, KINDS.index(event.kind), event.microbatch, event.partition, *times, *ends])
    own = {j: [event for event in events if event.partition == j] for j, _ in keys}
    lanes = [{"partition": j, "stream": stream, "device": computing_devices(own[j])} for j, stream in keys]
    return {"span_us": round(span, 2), "devices": devices, "lanes": lanes, "events": boxes}


def _order(run: dict[str, Any]) -> tuple[int, str]:
    variant = run["variant"]
    return (PUBLISHED.index(variant) if variant in PUBLISHED else len(PUBLISHED), str(run["cell"]))


def _name_apart(runs: Sequence[dict[str, Any]]) -> None:
    """A variant names its run, unless another run of the set has the same; then the cell does."""
    variants = [run["variant"] for run in runs]
    for run in runs:
        run["name"] = run["variant"] if variants.count(run["variant"]) == 1 else run["cell"]
