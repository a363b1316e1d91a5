"""What Perfetto leaves out of a trace: it counts whole nanoseconds, and slices of a track must lie in one another."""

from __future__ import annotations

from typing import Any


def partial_overlaps(trace: dict[str, Any]) -> list[str]:
    """Names of the slices that begin in another one of their track and end after it."""
    tracks: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for row in trace["traceEvents"]:
        if row["ph"] == "X":
            # As Perfetto reads numbers (json_utils.cc, CoerceToTs).
            start, length = int(row["ts"] * 1000.0), int(row["dur"] * 1000.0)
            tracks.setdefault((row["pid"], row["tid"]), []).append((start, -start - length, row["name"]))
    found = []
    for slices in tracks.values():
        ends: list[int] = []
        for start, negative, name in sorted(slices):
            ends = [end for end in ends if end > start]
            if any(end < -negative for end in ends):
                found.append(name)
            ends.append(-negative)
    return found
