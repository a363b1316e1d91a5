"""Free memory as intervals: what the caching allocator keeps for one stream and one class of sizes.

An interval is one integer, ``size << 48 | address``, so a sorted list of them is in the order in which the allocator
chooses, and what is left of one is a difference:

    interval                                    size << 48 | address
    a block of it                             wanted << 48 | address
    what is left            (size - wanted) << 48 | address + wanted

Segments do not touch, so two intervals that touch are neighbours of one segment and become one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from typing import Final

__all__ = [
    "ADDRESS",
    "MIB",
    "MIN_BLOCK",
    "SHIFT",
    "SMALL",
    "Larger",
    "Pool",
    "Requests",
    "State",
    "rounded",
    "segment_length",
]

MIB: Final = 2**20
MIN_BLOCK: Final = 512
SMALL: Final = MIB
SMALL_SEGMENT: Final = 2 * MIB
LARGE_SEGMENT: Final = 20 * MIB
OWN_SEGMENT: Final = 10 * MIB
ROUND_LARGE: Final = 2 * MIB

SHIFT: Final = 48
ADDRESS: Final = 2**SHIFT - 1
"""An interval is ``size << SHIFT | address``."""

_Places = tuple[dict[int, int], dict[int, int]]

Request = tuple[int, int]
"""Block, and bytes to take, shifted by :data:`SHIFT`; 0 to give it back, negative to take and give back at once."""

Requests = tuple[list[int], list[int]]
"""Many of them, in columns."""

Larger = Sequence[tuple[int, int]]
"""Takes that got more bytes than they asked for: their numbers, and the bytes too many."""

Grow = Callable[[int], tuple[int, int]]
"""Makes a segment for a block of a size; gives its address and length."""


def rounded(nbytes: int) -> int:
    """Bytes that a request takes."""
    return -(-nbytes // MIN_BLOCK) * MIN_BLOCK or MIN_BLOCK


def segment_length(size: int) -> int:
    """Bytes of the segment that is made for a block of ``size``."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUND_LARGE) * ROUND_LARGE


class State:
    """What was free in a pool; states with the same intervals are equal.

    Args:
        free: intervals in order.
    """

    __slots__ = ("_hash", "_places", "free")

    def __init__(self, free: tuple[int, ...]) -> None:
        self.free = free
        self._places: _Places | None = None
        # Asked for again and again; a tuple does not remember its own.
        self._hash = hash(free)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self.free == other.free

    def places(self) -> _Places:
        """Intervals by start and by end, not to be changed; found when they are first asked for."""
        if self._places is None:
            starts = {interval & ADDRESS: interval for interval in self.free}
            self._places = starts, {start + (interval >> SHIFT): interval for start, interval in starts.items()}
        return self._places


class Shrinking:
    """Finds out by how much an interval could be smaller, so that a row of requests would still be met the same way.

    Args:
        pool: where it is, before the requests.
        end: its end.

    Attributes:
        room: bytes that it can lack without another choice being made.
    """

    __slots__ = ("end", "room")

    def __init__(self, pool: Pool, end: int) -> None:
        self.end, self.room = end, pool.free_before(end)

    def chosen(self, left: int, wanted: int, interval: int, keep: int) -> None:
        """Note a choice.

        Args:
            left: bytes that are left at the interval's end; what is asked for has been taken from it or from another.
            wanted: bytes asked for.
            interval: what they are taken from.
            keep: least bytes that are split off.
        """
        if interval & ADDRESS == self.end - left:
            # It is what is cut, and something has to be left over, as it is now.
            room = left - wanted - keep
        elif left >= wanted:
            # It has to stay larger than what is chosen.
            room = left - (interval >> SHIFT) - 1
        else:
            return
        if room < self.room:
            self.room = max(room, 0)


class Pool:
    """The free intervals of one stream and one class of sizes.

    Args:
        small: which class.

    Attributes:
        keep: least bytes that are split off.
    """

    __slots__ = ("_ends", "_free", "_restored", "_segments", "_starts", "_state", "keep")

    def __init__(self, *, small: bool) -> None:
        self.keep = MIN_BLOCK if small else SMALL + 1
        # The intervals in order, by start and by end.
        self._free: list[int] = []
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._segments: dict[int, int] = {}
        # While nothing has changed since it was saved or restored; restored, all three are behind.
        self._state: State | None = None
        self._restored = False

    def take(self, size: int) -> tuple[int, int] | None:
        """Address and size of a block for ``size`` bytes; None if no free interval is large enough."""
        if self._state is not None:
            self._own()
        free = self._free
        place = bisect_left(free, size << SHIFT)
        if place == len(free):
            return None
        interval = free.pop(place)
        address, found = interval & ADDRESS, interval >> SHIFT
        del self._starts[address]
        if found - size < self.keep:
            del self._ends[address + found]
            return address, found
        left = interval - (size << SHIFT) + size
        insort(free, left, 0, place)
        self._starts[address + size] = self._ends[address + found] = left
        return address, size

    def give(self, address: int, size: int) -> None:
        """Take a block back."""
        if self._state is not None:
            self._own()
        free, starts, ends = self._free, self._starts, self._ends
        interval, end = size << SHIFT | address, address + size
        after, before = starts.pop(end, 0), ends.pop(address, 0)
        if after:
            del free[bisect_left(free, after)]
            interval += after - end
            end += after >> SHIFT
        if before:
            del free[bisect_left(free, before)]
            interval += before - address
            address = before & ADDRESS
        insort(free, interval)
        starts[address] = ends[end] = interval

    def replay(
        self, requests: Iterable[Request], blocks: dict[int, int], grow: Grow, shrinking: Shrinking | None = None
    ) -> tuple[list[int], Larger]:
        """Many :meth:`take` and :meth:`give` in a row, without a call for each: a simulation does little else.

        Args:
            requests: what to take and to give.
            blocks: intervals of blocks that were taken before; those that are taken or given are put there and removed.
            grow: size -> a new segment, when there is no room.
            shrinking: an interval to be watched.

        Returns:
            What each take chose; and for those that got more than they asked for, their number and the bytes too many.
        """
        self._own()
        free, starts, ends, keep = self._free, self._starts, self._ends, self.keep << SHIFT
        chosen, larger = list[int](), list[tuple[int, int]]()
        for block, wanted in requests:
            if not wanted:
                interval = blocks.pop(block)
                address = interval & ADDRESS
                end = address + (interval >> SHIFT)
                after, before = starts.pop(end, 0), ends.pop(address, 0)
                if after:
                    del free[bisect_left(free, after)]
                    interval, end = interval + after - end, end + (after >> SHIFT)
                if before:
                    del free[bisect_left(free, before)]
                    interval, address = interval + before - address, before & ADDRESS
                insort(free, interval)
                starts[address] = ends[end] = interval
                continue
            least = wanted if wanted > 0 else -wanted
            place = bisect_left(free, least)
            if place == len(free):
                self.add(*grow(least >> SHIFT))
                place = bisect_left(free, least)
            interval = free[place]
            if shrinking is not None and shrinking.end in ends:
                shrinking.chosen(ends[shrinking.end] >> SHIFT, least >> SHIFT, interval, self.keep)
            left = interval - least
            if ADDRESS < left < keep:
                larger.append((len(chosen), left >> SHIFT))
            chosen.append(interval)
            if wanted < 0:
                continue
            del free[place]
            address = interval & ADDRESS
            del starts[address]
            if left < keep:
                del ends[address + (interval >> SHIFT)]
                blocks[block] = interval
                continue
            blocks[block] = least | address
            size = least >> SHIFT
            left += size
            insort(free, left, 0, place)
            starts[address + size] = ends[address + (interval >> SHIFT)] = left
        return chosen, larger

    def free_before(self, end: int) -> int:
        """Bytes of the free interval that ends at an address."""
        if self._restored:
            self._own()
        return self._ends.get(end, 0) >> SHIFT

    def add(self, address: int, length: int) -> None:
        """Add a new segment."""
        self._segments[address] = length
        self.give(address, length)

    def shrink(self) -> int:
        """Drop the segments that are free as a whole; gives their bytes."""
        self._own()
        whole = [start for start, length in self._segments.items() if self._starts.get(start, 0) >> SHIFT == length]
        gone = 0
        for start in whole:
            length = self._segments.pop(start)
            del self._free[bisect_left(self._free, self._starts.pop(start))], self._ends[start + length]
            gone += length
        return gone

    def save(self) -> State:
        """What is free now."""
        if self._state is None:
            self._state = State(tuple(self._free))
        return self._state

    def intervals(self) -> tuple[int, ...]:
        """The free intervals in order."""
        return self._state.free if self._restored and self._state is not None else tuple(self._free)

    def restore(self, state: State) -> None:
        """Make that free which ``state`` says, and nothing else; segments made since are gone."""
        self._state, self._restored = state, True

    def _own(self) -> None:
        """Before a change: leave the state to whoever saved it."""
        if self._state is not None and self._restored:
            starts, ends = self._state.places()
            self._free, self._starts, self._ends = list(self._state.free), starts.copy(), ends.copy()
        self._state, self._restored = None, False
