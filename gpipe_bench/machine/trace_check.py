"""Refuses a trace whose rows do not fit together, as those of a file that a person has changed or cut may not."""

from __future__ import annotations

from typing import Final

from gpipe_bench.errors import TraceError
from gpipe_bench.machine.trace import KINDS, Trace

_MOST: Final = 1 << 16
"""The highest number of a thread, a stream or a device."""

_NODES: Final = frozenset({"node", "root", "return"})
_BEGIN_VERSIONS: Final = frozenset({"record", "signal", "backward", "nest"})


def check_rows(trace: Trace) -> None:
    """Check that the rows of a trace which came from a file fit together.

    Raises:
        TraceError: a row cannot run.
    """
    made: dict[int, str] = {}
    latest = 0
    parts = {(row.version, KINDS[row.kind]) for row in trace.rows}
    for number, row in enumerate(trace.rows):
        kind, begins = KINDS[row.kind], KINDS[row.kind] in _BEGIN_VERSIONS
        rules = (
            (
                f"thread, stream and peer_stream must be from 0 to {_MOST}, device and peer from -1, the host",
                all(0 <= value <= _MOST for value in (row.thread, row.stream, row.peer_stream))
                and all(-1 <= value <= _MOST for value in (row.device, row.peer)),
            ),
            (
                "launches, adding_launches, gradients and task must be 0 or more, and bytes of copies and allocations",
                min(row.launches, row.adding_launches, row.gradients, row.task) >= 0
                and (row.bytes >= 0 or kind in _NODES),
            ),
            (
                "a task must have of, microbatch and partition; what adds gradients must be among the launches",
                row.task <= len(trace.tasks)
                and row.adding_launches <= row.launches
                and row.gradients <= len(trace.rows),
            ),
            ("a busy host must have a duration", row.duration_ns >= 0 or kind not in {"host", "update"}),
            ("a node must write one block, its own number", kind not in _NODES or row.end_write == row.first_write + 1),
            (
                "versions must ascend, each above the backward pass of its row",
                not begins or max(latest, getattr(row, "pass")) < row.version,
            ),
            (
                "a root, and what returns, must be of a nested pass before it",
                kind not in {"root", "return"} or made.get(row.version) == "nest",
            ),
            (
                "a nested pass must have a root and a return",
                kind != "nest" or {(row.version, "root"), (row.version, "return")} <= parts,
            ),
        )
        if broken := next((rule for rule, holds in rules if not holds), None):
            raise TraceError(f"{broken}, got another in line {number + 2} of {trace.origin}; write the trace anew")
        if begins:
            made[row.version], latest = kind, row.version
