"""Recorded steps as data of the interactive timeline: lanes, boxes, and what to say of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpipe_bench.components import PUBLISHED
from gpipe_bench.drawing.colours import KIND_COLOURS, KIND_WORDS
from gpipe_bench.figures.groups import setting_words
from gpipe_bench.figures.lanes import lane_keys, stack
from gpipe_bench.figures.runs import Run, choose_run
from gpipe_bench.figures.tables import RecordedEvent
from gpipe_bench.results.outcomes import way_of
from gpipe_bench.results.rows import EVIDENCE, Row
from gpipe_bench.results.timeline import KINDS, TimelineEvent, computing_devices

EVENT_FIELDS: Final = (
    *("lane", "kind", "microbatch", "partition", "start_us", "end_us", "issue_us", "bytes", "device"),
    *("track", "tracks"),
)
"""What the numbers of an event are, in order; ``kind`` and ``device`` are indices."""


def kinds() -> list[dict[str, str]]:
    """Name, words and colour of every kind of task, in the order of their indices."""
    return [{"name": kind, "words": KIND_WORDS[kind], "colour": KIND_COLOURS[kind]} for kind in KINDS]


def timeline_set(name: str, events: Sequence[RecordedEvent], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The recorded steps of one experiment: a set per kind of evidence, in each a run per cell.

    Where there are published variants, these alone. Of several repeats the one whose step time is nearest to their
    median.

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
        printed = {cell: own for cell, own in cells.items() if own[0].variant in PUBLISHED}
        runs = []
        for cell, records in (printed or cells).items():
            own = [row for row in rows if row.cell == cell] or list(rows)
            runs.append(choose_run(records, own, records[0].variant, evidence))
        if runs:
            order = {variant: place for place, variant in enumerate(PUBLISHED)}
            runs.sort(key=lambda run: (run.row.flavour != "published", order.get(run.row.variant, len(order))))
            names = _names([run.row for run in runs])
            drawn = [
                {"name": one, "words": _words(run), **_drawn(run.events)} for one, run in zip(names, runs, strict=True)
            ]
            sets.append({"name": f"{name}, {evidence}", "evidence": evidence, "runs": drawn})
    return sets


def _names(rows: Sequence[Row]) -> list[str]:
    """What tells runs apart: the schedule, the way to run or the variant; the autograd engine; numbers that differ."""
    flavours = len({row.flavour for row in rows}) > 1
    names = []
    for row in rows:
        flavour = f" (PyTorch {'1.3' if row.flavour == 'published' else '2'})" if flavours else ""
        scheduled = row.schedule if row.backward == "scheduled" else ""
        processes = f" in {row.processes} processes" if (row.processes or 1) > 1 else ""
        names.append(f"{way_of(row) or scheduled or row.variant}{processes}{flavour}")
    many = Counter(names)
    numbers = [f", n={row.partitions}, m={row.chunks}, {row.checkpoint}, batch {row.batch_size}" for row in rows]
    return [name + (more if many[name] > 1 else "") for name, more in zip(names, numbers, strict=True)]


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
            times = [round(value - zero, 1) for value in (event.start_us, event.end_us, event.issue_us)]
            ends = [event.bytes, devices.index(event.device), box.track, box.tracks]
            boxes.append([lane, KINDS.index(event.kind), event.microbatch, event.partition, *times, *ends])
    own = {j: [event for event in events if event.partition == j] for j, _ in keys}
    homes = {j: computing_devices(own[j]) for j, _ in keys}
    depths = _depths(homes)
    lanes = [{"partition": j, "stream": stream, "device": homes[j], "depth": depths[j]} for j, stream in keys]
    return {"span_us": round(span, 1), "devices": devices, "lanes": lanes, "events": boxes}


def _depths(homes: Mapping[int, str]) -> dict[int, float]:
    """From 0, the first partition of a device, to 1, the last one; 0 for all where no device has a partition alone.

    Partitions on one device alone are those of threads, which take no turns.
    """
    shared = {j: [other for other in sorted(homes) if homes[other] == homes[j]] for j in homes}
    if len({*homes.values()}) == 1:
        return dict.fromkeys(homes, 0.0)
    return {j: same.index(j) / max(len(same) - 1, 1) for j, same in shared.items()}
