"""What a row of requests did to free memory, told so that it can be done again elsewhere.

Best fit looks at sizes and, among equals, at the order of addresses. So what a row of requests does hangs on few of the
free intervals: those that it takes from, and that none of the others would have suited better. Where a pool has
intervals of the same sizes in the same order, and no other that would suit, the same happens there, at other addresses:

    found     ··[ 4 ]···[ 9 ]·······[ 2 ]··        took from 4 and 9, would have taken anything from 3 to 8
    elsewhere ·····[ 4 ]··[ 12 ]··[ 9 ]····        the same, shifted: 12 never suited better

What is kept from pass to pass is often cut from one large interval, so each pass finds it a little smaller. Its size
may change as far as no choice does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from gpipe_bench.simulator.memory.pools import ADDRESS, SHIFT, Larger, Pool, Shrinking, State

__all__ = ["Footprint", "Footprints"]

_LAST: Final = 8
"""Footprints that are tried; older ones hardly ever fit."""


class Footprint:
    """What a row of requests did to a pool.

    Args:
        before: what was free.
        after: what was free at its end.
        blocks: blocks in use at its end that were not before, with their intervals.
        choices: bytes that its takes asked for, and the intervals that they chose.
        shrinking: an interval that may be smaller.
    """

    __slots__ = (
        *("_blocks", "_done", "_end", "_first", "_left", "_number", "_room", "_starts", "_suited", "_whole"),
        "sizes",
    )

    def __init__(
        self,
        before: State,
        after: State,
        blocks: dict[int, int],
        choices: tuple[Sequence[int], Sequence[int]],
        shrinking: Shrinking | None = None,
    ) -> None:
        # Intervals that were there at the beginning, not pieces of them.
        whole = self._whole = set(before.free).intersection(choices[1])
        of = {found & ADDRESS: found >> SHIFT for found in whole}
        self._starts = sorted(of)
        self.sizes = [of[start] for start in self._starts]
        # The interval that may be smaller, and its end.
        self._number, self._room, self._end = -1, 0, 0
        if shrinking is not None:
            ends = [start + of[start] for start in self._starts]
            if shrinking.end in ends:
                self._number, self._room, self._end = ends.index(shrinking.end), shrinking.room, shrinking.end
        # Most footprints fit nowhere: the rest is found when one does for the first time.
        self._done: tuple[State, State, dict[int, int], tuple[Sequence[int], Sequence[int]]] | None
        self._done = before, after, blocks, choices
        # What is left at the end, and blocks in use, with the number of the interval that each is cut from.
        self._left: list[tuple[int, int, int]] = []
        self._blocks: list[tuple[int, int, int]] = []
        # Where what is left of the interval that may be smaller starts, and what would have suited better.
        self._first = -1
        self._suited: list[int] = []

    def again(self, state: State) -> tuple[State, dict[int, int]] | None:
        """What the requests leave free and in use where ``state`` is free; None if they might do something else."""
        taken = self._find(state.free)
        if taken is None:
            return None
        if self._done is not None:
            self._find_out(*self._done)
            self._done = None
        if self._suited_others(state.free, sorted(taken)):
            return None
        free = list(state.free)
        for interval in taken:
            del free[bisect_left(free, interval)]
        shifts = [(interval & ADDRESS) - start for interval, start in zip(taken, self._starts, strict=True)]
        lacking = self.sizes[self._number] - (taken[self._number] >> SHIFT) if self._number >= 0 else 0
        for number, old_start, old_size in self._left:
            start = old_start + shifts[number]
            size = old_size - lacking if old_start == self._first else old_size
            insort(free, size << SHIFT | start)
        return State(tuple(free)), {block: at + shifts[number] for block, number, at in self._blocks}

    def _find_out(
        self, before: State, after: State, blocks: dict[int, int], choices: tuple[Sequence[int], Sequence[int]]
    ) -> None:
        """Find what is needed to do the same again."""
        whole, starts = self._whole, self._starts
        left = set(after.free).difference(set(before.free) - whole)
        places = [(found & ADDRESS, found >> SHIFT) for found in left]
        self._left = [(bisect_right(starts, start) - 1, start, size) for start, size in places]
        self._blocks = [(block, bisect_right(starts, at & ADDRESS) - 1, at) for block, at in blocks.items()]
        if self._number >= 0:
            self._first = next((start for start, size in places if start + size == self._end), -1)
        # Of equal ones the first is taken, which a piece may be or not.
        once = set(zip(*choices, strict=True))
        suited = _union((wanted, (found >> SHIFT) + (found not in whole)) for wanted, found in once)
        self._suited = [size << SHIFT for size in suited]

    def _suited_others(self, free: Sequence[int], taken: Sequence[int]) -> bool:
        """Whether others than those that are taken would have suited; both in order."""
        for low, high in zip(self._suited[::2], self._suited[1::2], strict=True):
            count, own = (bisect_left(row, high) - bisect_left(row, low) for row in (free, taken))
            if count > own:
                return True
        return False

    def end_of_difference(self, other: Footprint) -> int | None:
        """Where the only interval ends whose size differs from that in another footprint, if there is one."""
        if len(self.sizes) != len(other.sizes):
            return None
        found = [number for number, size in enumerate(self.sizes) if size != other.sizes[number]]
        return self._starts[found[0]] + self.sizes[found[0]] if len(found) == 1 else None

    def _find(self, free: Sequence[int]) -> list[int] | None:
        """The intervals to take from, in the order of addresses: of each size the first ones."""
        places: dict[int, int] = {}
        taken = []
        for number, size in enumerate(self.sizes):
            if number == self._number:
                continue
            place = places[size] + 1 if size in places else bisect_left(free, size << SHIFT)
            if place == len(free) or free[place] >> SHIFT != size:
                return None
            places[size] = place
            taken.append(free[place])
        if self._number >= 0:
            largest = self.sizes[self._number]
            low, high = (bisect_left(free, size << SHIFT) for size in (largest - self._room, largest + 1))
            found = [interval for interval in free[low:high] if interval not in taken]
            # Of two, either would suit.
            if len(found) != 1:
                return None
            taken.insert(self._number, found[0])
        return taken if all(before & ADDRESS < after & ADDRESS for before, after in pairwise(taken)) else None


class Footprints:
    """The last footprints of a row of requests, and what changed from one to the next."""

    def __init__(self) -> None:
        # With the takes that got more than they asked for.
        self._known: deque[tuple[Footprint, Larger]] = deque(maxlen=_LAST)
        self._end: int | None = None

    def again(self, state: State) -> tuple[State, dict[int, int], Larger] | None:
        """What is left free and in use, and which takes get more than they ask for, if the same happens as before."""
        for footprint, larger in self._known:
            found = footprint.again(state)
            if found is not None:
                return *found, larger
        return None

    def shrinking(self, pool: Pool) -> Shrinking | None:
        """The interval to be watched: the only one that had changed the last time."""
        return None if self._end is None else Shrinking(pool, self._end)

    def add(self, footprint: Footprint, larger: Larger) -> None:
        """Keep what the requests did."""
        self._end = footprint.end_of_difference(self._known[0][0]) if self._known else None
        self._known.appendleft((footprint, larger))


def _union(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Half-open ranges as a rising list of the ends of their union."""
    ends: list[int] = []
    for start, stop in sorted(ranges):
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], stop)
        elif start < stop:
            ends += start, stop
    return ends
