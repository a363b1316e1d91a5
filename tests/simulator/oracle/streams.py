"""What the clock runs: operations on streams, and events that tell when a stream has come so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Final

__all__ = ["Event", "Operation", "Stream", "Thread", "follow"]

Thread = Generator[int | None, None, None]
"""A host thread: ``yield t`` goes on at time t, ``yield None`` when somebody resumes it."""

_UNKNOWN: Final = -1


class Operation:
    """Something that runs on streams.

    Attributes:
        turn: of several that are ready at one time, the lowest goes first: when it was issued, device, stream, number.
        duration: nanoseconds.
        launches: host calls that issue it.
        engines: what it occupies while it runs.
        issued: when the host has issued the last of it; it cannot end before.
        start: when it began; -1 before.
        end: when it ended; -1 before.
        missing: unfinished operations that it waits for.
        ready: when it had nothing left to wait for but engines.
        followers: what waits for its end.
        starters: host threads that wait for its start.
    """

    __slots__ = (
        "duration",
        "end",
        "engines",
        "followers",
        "issued",
        "launches",
        "missing",
        "ready",
        "start",
        "starters",
        "turn",
    )

    def __init__(
        self, turn: tuple[int, ...], duration: int, launches: int, engines: tuple[int, ...], issued: int
    ) -> None:
        self.turn = turn
        self.duration = duration
        self.launches = launches
        self.engines = engines
        self.issued = issued
        self.start = _UNKNOWN
        self.end = _UNKNOWN
        self.missing = 0
        self.ready = _UNKNOWN
        self.followers: list[Operation | Event] | None = None
        self.starters: list[Thread] | None = None


class Event:
    """Something that somebody asks about later: whether what was queued on a stream has run.

    Attributes:
        missing: operations that have not ended.
        passed: where the event puts itself when none is left.
    """

    __slots__ = ("missing", "passed")

    def __init__(self, passed: list[Event]) -> None:
        self.missing = 0
        self.passed = passed


class Stream:
    """A queue of operations.

    Attributes:
        tail: the last operation issued, if it has not been seen to end.
        awaited: operations of other streams that the next one waits for.
        launched: launches so far.
        queued: (launches before, operation) for what may still fill the launch queue.
    """

    __slots__ = ("awaited", "launched", "queued", "tail")

    def __init__(self) -> None:
        self.tail: Operation | None = None
        self.awaited: list[Operation] = []
        self.launched = 0
        self.queued: deque[tuple[int, Operation]] = deque()

    def pending(self) -> list[Operation]:
        """Unfinished operations that an event recorded now would wait for."""
        tail = self.tail
        if not self.awaited:
            return [] if tail is None or tail.end >= 0 else [tail]
        found = [operation for operation in self.awaited if operation.end < 0]
        if tail is not None and tail.end < 0 and tail not in found:
            found.append(tail)
        return found


def follow(leader: Operation, follower: Operation) -> int:
    """Make ``follower`` wait for the end of ``leader``; 1, or 0 if it does already."""
    if leader.followers is None:
        leader.followers = [follower]
    elif leader.followers[-1] is follower or follower in leader.followers:
        return 0
    else:
        leader.followers.append(follower)
    return 1
