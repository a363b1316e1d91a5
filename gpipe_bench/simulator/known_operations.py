"""Operations of pipelines whose order of issue is known: computed when they are issued, without an agenda of ends.

An operation starts when all that its streams hold has ended. With a device per partition the compute engines are always
free then, and so are links that nothing else shares and whose copies come in order. What shares an engine with other
copies, as portals do, takes turns on it as on :class:`gpipe_bench.simulator.clock.Clock`: first come, first served,
then in the order of issue. Whatever waits for one of these is computed when it has started.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

__all__ = ["COMPUTE", "Disorder", "Operations"]

COMPUTE: Final = -1
"""In place of a link."""

_UNKNOWN: Final = -1


class Disorder(Exception):  # noqa: N818 - a signal: links must be looked at as shared ones
    """A copy was ready before the one issued ahead of it on the same link."""


class _Pending:
    """An operation whose start is not known yet."""

    __slots__ = ("duration", "issued", "link", "missing", "ready")

    def __init__(self, missing: int, ready: int, duration: int, issued: int, link: int) -> None:
        self.missing, self.ready, self.duration, self.issued, self.link = missing, ready, duration, issued, link


class Operations:
    """All operations, numbered in the order of issue.

    Args:
        engines: of each link.
        shared: of each link, whether copies of others may be in its way.

    Attributes:
        starts: when each began; -1 while that is not known.
        ends: when each ended; likewise.
        agenda: (time, number) of copies on shared links: when one is ready, and of ~number when it has ended.
        awaited: operations whose start somebody waits for.
        known: those of them whose start became known, to be cleared by whoever waits.
    """

    def __init__(self, engines: Sequence[tuple[int, ...]], shared: Sequence[bool]) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.agenda: list[tuple[int, int]] = []
        self.awaited: set[int] = set()
        self.known: list[int] = []
        self._engines, self._shared = engines, shared
        self._tails = [_UNKNOWN] * len(engines)
        self._ready = [0] * len(engines)
        self._pending: dict[int, _Pending] = {}
        self._followers: dict[int, list[int]] = {}
        # Of an unshared copy the one before it on its link, if it is not on its streams too; of ~a shared one its link.
        self._links: dict[int, int] = {}
        self._busy: set[int] = set()
        # Copies that are ready, at an engine that they wait for.
        self._waiting: dict[int, list[tuple[int, int]]] = {}

    def issue(self, now: int, before: tuple[int, ...], duration: int, issued: int, link: int = COMPUTE) -> int:
        """Issue an operation; gives its number.

        Args:
            now: when.
            before: operations that it waits for.
            duration: nanoseconds.
            issued: when the host has issued the last of it.
            link: of a copy.

        Raises:
            Disorder: copies of a link that nothing shares do not come in order.
        """
        ends = self.ends
        number, ready, missing = len(ends), now, 0
        for one in before:
            end = ends[one]
            if end < 0:
                self._followers.setdefault(one, []).append(number)
                missing += 1
            elif end > ready:
                ready = end
        start = _UNKNOWN
        if link >= 0:
            start = self._copy(number, link, before, _Pending(missing, ready, duration, issued, link))
        elif missing:
            self._pending[number] = _Pending(missing, ready, duration, issued, link)
        else:
            start = ready
        self.starts.append(start)
        ends.append(start if start < 0 else max(start + duration, issued))
        return number

    def _copy(self, number: int, link: int, before: tuple[int, ...], own: _Pending) -> int:
        """When a copy starts; -1 if that is not known."""
        if self._shared[link]:
            self._pending[number] = own
            if not own.missing:
                heappush(self.agenda, (own.ready, number))
            return _UNKNOWN
        tail, self._tails[link] = self._tails[link], number
        # What it waits for on its streams has been counted; the link is another matter.
        apart = tail >= 0 and tail not in before
        if apart and self.ends[tail] < 0:
            self._followers.setdefault(tail, []).append(number)
            own.missing += 1
        if not own.missing:
            return self._in_order(link, own.ready, tail)
        self._pending[number] = own
        if apart:
            self._links[number] = tail
        return _UNKNOWN

    def _in_order(self, link: int, ready: int, tail: int) -> int:
        """When a copy starts behind the one before it on its link."""
        if ready < self._ready[link]:
            raise Disorder
        self._ready[link] = ready
        return max(ready, self.ends[tail]) if tail >= 0 else ready

    def settle(self) -> None:
        """Start what is ready at the next time of the agenda, where engines are free."""
        agenda = self.agenda
        now = agenda[0][0]
        # (ready, number, engine that it waited for)
        trying: list[tuple[int, int, int]] = []
        freed: list[int] = []
        while agenda and agenda[0][0] == now:
            number = heappop(agenda)[1]
            if number < 0:
                freed += self._engines[self._links.pop(number)]
            else:
                heappush(trying, (now, number, _UNKNOWN))
        self._busy.difference_update(freed)
        for engine in freed:
            self._next(engine, trying)
        while trying:
            ready, number, engine = heappop(trying)
            engines = self._engines[self._pending[number].link]
            taken = next((one for one in engines if one in self._busy), None)
            if taken is None:
                self._busy.update(engines)
                self._start(number, now)
            else:
                heappush(self._waiting.setdefault(taken, []), (ready, number))
            # While an engine is free the next one that waits for it may try.
            if engine not in self._busy:
                self._next(engine, trying)

    def _next(self, engine: int, trying: list[tuple[int, int, int]]) -> None:
        waiting = self._waiting.get(engine)
        if waiting:
            heappush(trying, (*heappop(waiting), engine))

    def _start(self, first: int, now: int) -> None:
        """An operation starts, and with it all that is known then."""
        todo = [(first, now)]
        while todo:
            number, start = todo.pop()
            own = self._pending.pop(number)
            end = max(start + own.duration, own.issued)
            self.starts[number], self.ends[number] = start, end
            if number in self.awaited:
                self.known.append(number)
            if own.link >= 0 and self._shared[own.link]:
                self._links[~number] = own.link
                heappush(self.agenda, (end, ~number))
            for follower in self._followers.pop(number, ()):
                other = self._pending[follower]
                other.missing -= 1
                if self._links.get(follower) != number:
                    other.ready = max(other.ready, end)
                if other.missing:
                    continue
                if other.link < 0:
                    todo.append((follower, other.ready))
                elif self._shared[other.link]:
                    heappush(self.agenda, (other.ready, follower))
                else:
                    tail = self._links.pop(follower, _UNKNOWN)
                    todo.append((follower, self._in_order(other.link, other.ready, tail)))
