"""Operations of pipelines whose order of issue is known: computed when they are issued, without an agenda of ends.

An operation starts when all that its streams hold has ended. With a device per partition the compute engines are always
free then, and so are links that nothing else shares and whose copies come in order. What shares an engine with other
copies, as portals do, takes turns on it as on :class:`gpipe_bench.simulator.virtual_time.clock.Clock`: first come,
first served, then in the order of issue. Whatever waits for one of these is computed when it has started.
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


_MISSING, _READY, _DURATION, _ISSUED, _LINK = range(5)
_Pending = list[int]
"""Of an operation whose start is not known yet: how many others are missing, and the rest as it was issued."""


class Operations:
    """All operations, numbered in the order of issue.

    Args:
        engines: of each link.
        shared: of each link, whether copies of others may be in its way.

    Attributes:
        starts: when each began; -1 while that is not known.
        ends: when each ended; likewise.
        agenda: (time, number) of copies on shared links: when one is ready; and of ~engine when it is free for those
            that wait for it.
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
        # Of an unshared copy the one before it on its link, if it is not on its streams too.
        self._links: dict[int, int] = {}
        count = 1 + max((engine for link in engines for engine in link), default=0)
        # When each engine is free, and when those that wait for it will be told, which are ready copies.
        self._free = [0] * count
        self._told = [_UNKNOWN] * count
        self._waiting: list[list[tuple[int, int]]] = [[] for _ in range(count)]

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
            if end > ready:
                ready = end
            elif end < 0:
                missing += 1
                followers = self._followers.get(one)
                if followers is None:
                    self._followers[one] = [number]
                else:
                    followers.append(number)
        start = _UNKNOWN
        if link < 0:
            if missing:
                self._pending[number] = [missing, ready, duration, issued, link]
            else:
                start = ready
        elif self._shared[link]:
            self._pending[number] = [missing, ready, duration, issued, link]
            if not missing:
                heappush(self.agenda, (ready, number))
        else:
            start = self._copy(number, before, [missing, ready, duration, issued, link])
        self.starts.append(start)
        if start >= 0:
            start += duration
            start = max(issued, start)
        ends.append(start)
        return number

    def _copy(self, number: int, before: tuple[int, ...], own: _Pending) -> int:
        """When a copy on a link that nothing shares starts; -1 if that is not known."""
        link = own[_LINK]
        tail, self._tails[link] = self._tails[link], number
        # What it waits for on its streams has been counted; the link is another matter.
        apart = tail >= 0 and tail not in before
        if apart and self.ends[tail] < 0:
            self._followers.setdefault(tail, []).append(number)
            own[_MISSING] += 1
        if not own[_MISSING]:
            return self._in_order(link, own[_READY], tail)
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
        agenda, free = self.agenda, self._free
        now, number = heappop(agenda)
        if number >= 0 and not (agenda and agenda[0][0] == now):
            # As a rule it is alone, and its engines are free.
            link = self._pending[number][_LINK]
            for engine in self._engines[link]:
                if free[engine] > now:
                    self._wait(engine, (now, number))
                    return
            self._take(number, link, now)
            return
        # (ready, number, engine that it waited for)
        trying: list[tuple[int, int, int]] = []
        while True:
            if number >= 0:
                heappush(trying, (now, number, _UNKNOWN))
            else:
                self._next(~number, trying)
            if not agenda or agenda[0][0] > now:
                break
            _, number = heappop(agenda)
        while trying:
            ready, number, engine = heappop(trying)
            link = self._pending[number][_LINK]
            taken = next((one for one in self._engines[link] if free[one] > now), None)
            if taken is None:
                self._take(number, link, now)
            else:
                self._wait(taken, (ready, number))
            # While an engine is free the next one that waits for it may try.
            if engine >= 0 and free[engine] <= now:
                self._next(engine, trying)

    def _next(self, engine: int, trying: list[tuple[int, int, int]]) -> None:
        waiting = self._waiting[engine]
        if waiting:
            heappush(trying, (*heappop(waiting), engine))

    def _wait(self, engine: int, ready: tuple[int, int]) -> None:
        """A copy waits for an engine that is not free."""
        heappush(self._waiting[engine], ready)
        self._tell(engine)

    def _tell(self, engine: int) -> None:
        time = self._free[engine]
        if self._told[engine] != time:
            self._told[engine] = time
            heappush(self.agenda, (time, ~engine))

    def _take(self, number: int, link: int, now: int) -> None:
        """A copy takes its engines."""
        self._start(number, now)
        end, engines = self.ends[number], self._engines[link]
        for engine in engines:
            self._free[engine] = end
            if self._waiting[engine]:
                self._tell(engine)

    def _start(self, first: int, now: int) -> None:
        """An operation starts, and with it all that is known then."""
        todo = [(first, now)]
        starts, ends, pending, links = self.starts, self.ends, self._pending, self._links
        awaited, followers_of, shared = self.awaited, self._followers, self._shared
        while todo:
            number, start = todo.pop()
            _, _, duration, end, _ = pending.pop(number)
            end = max(end, start + duration)
            starts[number], ends[number] = start, end
            if number in awaited:
                self.known.append(number)
            for follower in followers_of.pop(number, ()):
                other = pending[follower]
                other[_MISSING] -= 1
                if end > other[_READY] and (not links or links.get(follower) != number):
                    other[_READY] = end
                if other[_MISSING]:
                    continue
                ready, link = other[_READY], other[_LINK]
                if link < 0:
                    todo.append((follower, ready))
                elif shared[link]:
                    heappush(self.agenda, (ready, follower))
                else:
                    tail = links.pop(follower, _UNKNOWN)
                    todo.append((follower, self._in_order(link, ready, tail)))
