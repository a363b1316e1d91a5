"""Memory as a caching allocator would reserve it, from a trace.

The allocator of CUDA keeps a pool of blocks per stream. A freed block goes back to the pool of the stream that
allocated it; one on which other streams were recorded only when these have come to where the host was when it freed it.
With the host far ahead of the devices, as in a step that never synchronises, that is not before the step ends. So a
device reserves the sum over its streams of the peak of each pool, in which recorded blocks stay (CUDACachingAllocator;
its rounding and splitting of blocks are left out).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from gpipe_bench.emulator.trace import HOST, Record

__all__ = ["reserved"]


def reserved(records: Iterable[Record]) -> dict[int, int]:
    """Device -> bytes reserved during a trace, for what was allocated in it."""
    homes: dict[int, tuple[int, int]] = {}
    recorded: set[int] = set()
    current: defaultdict[tuple[int, int], int] = defaultdict(int)
    peak: defaultdict[tuple[int, int], int] = defaultdict(int)
    for record in records:
        if record.device == HOST:
            continue
        if record.kind == "alloc":
            homes[record.writes[0]] = record.queue
            current[record.queue] += record.nbytes
            peak[record.queue] = max(peak[record.queue], current[record.queue])
        elif record.kind == "record_stream" and homes.get(record.writes[0], record.queue) != record.queue:
            recorded.add(record.writes[0])
        elif record.kind == "free" and record.writes[0] in homes and record.writes[0] not in recorded:
            current[record.queue] -= record.nbytes
    devices: defaultdict[int, int] = defaultdict(int)
    for (device, _), nbytes in peak.items():
        devices[device] += nbytes
    return dict(devices)
