"""Free memory as intervals: what the caching allocator keeps for one stream and one class of sizes.

An interval is one integer, ``size << 48 | address``, so a sorted list of them is in the order in which the allocator
chooses. Segments do not touch, so two intervals that touch are neighbours of one segment and become one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import Final

__all__ = [
    "ADDRESS",
    "MIB",
    "SHIFT",
    "SMALL",
    "Choice",
    "Pool",
    "Request",
    "Spot",
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

Spot = tuple[int, int]
"""Address and size."""

Request = tuple[int, int]
"""Block, and bytes to take; 0 to give it back, negative to take and give back at once."""

Grow = Callable[[int], Spot]
"""Makes a segment for a block of a size."""

Choice = tuple[int, int]
"""Bytes asked for, and the interval that they were taken from."""


def rounded(nbytes: int) -> int:
    """Bytes that a request takes."""
    return -(-nbytes // MIN_BLOCK) * MIN_BLOCK or MIN_BLOCK


def segment_length(size: int) -> int:
    """Bytes of the segment that is made for a block of ``size``."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUND_LARGE) * ROUND_LARGE


class State:
    """What was free in a pool.

    Args:
        free: intervals in order.
    """

    __slots__ = ("_places", "free")

    def __init__(self, free: tuple[int, ...]) -> None:
        self.free = free
        self._places: _Places | None = None

    def places(self) -> _Places:
        """Size by address and address by end, not to be changed; found when they are first asked for."""
        if self._places is None:
            sizes = {interval & ADDRESS: interval >> SHIFT for interval in self.free}
            self._places = sizes, {address + size: address for address, size in sizes.items()}
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
            self.room = min(self.room, max(left - wanted - keep, 0))
        elif left >= wanted:
            # It has to stay larger than what is chosen.
            self.room = min(self.room, max(left - (interval >> SHIFT) - 1, 0))


class Pool:
    """The free intervals of one stream and one class of sizes.

    Args:
        small: which class.

    Attributes:
        keep: least bytes that are split off.
    """

    __slots__ = ("_ends", "_free", "_restored", "_segments", "_sizes", "_state", "keep")

    def __init__(self, *, small: bool) -> None:
        self.keep = MIN_BLOCK if small else SMALL + 1
        self._free: list[int] = []
        self._sizes: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._segments: dict[int, int] = {}
        # While nothing has changed since it was saved or restored; restored, sizes and ends are behind.
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
        end = address + found
        del self._sizes[address]
        rest = found - size
        if rest < self.keep:
            del self._ends[end]
            return address, found
        start = address + size
        insort(free, rest << SHIFT | start)
        self._sizes[start] = rest
        self._ends[end] = start
        return address, size

    def give(self, address: int, size: int) -> None:
        """Take a block back."""
        if self._state is not None:
            self._own()
        free, sizes, ends = self._free, self._sizes, self._ends
        after = sizes.pop(address + size, 0)
        if after:
            del free[bisect_left(free, after << SHIFT | address + size)]
            size += after
        before = ends.pop(address, None)
        if before is not None:
            length = sizes[before]
            del free[bisect_left(free, length << SHIFT | before)]
            address, size = before, size + length
        insort(free, size << SHIFT | address)
        sizes[address] = size
        ends[address + size] = address

    def replay(
        self, requests: Iterable[Request], spots: dict[int, Spot], grow: Grow, shrinking: Shrinking | None = None
    ) -> tuple[list[int], set[Choice]]:
        """Many :meth:`take` and :meth:`give` in a row, without a call for each.

        Args:
            requests: what to take and to give.
            spots: where blocks are that were taken before; those that are taken or given are put there and removed.
            grow: size -> a new segment, when there is no room.
            shrinking: an interval to be watched.

        Returns:
            By how much the bytes in use change with each take and give, and what was chosen.
        """
        self._own()
        free, sizes, ends, keep = self._free, self._sizes, self._ends, self.keep
        changes, chosen = list[int](), set[Choice]()
        for block, wanted in requests:
            if wanted:
                size = abs(wanted)
                place = bisect_left(free, size << SHIFT)
                if place == len(free):
                    place = self._added(*grow(size), size)
                interval = free[place]
                chosen.add((size, interval))
                if shrinking is not None and shrinking.end in ends:
                    shrinking.chosen(shrinking.end - ends[shrinking.end], size, interval, keep)
                address, found = interval & ADDRESS, interval >> SHIFT
                rest = found - size
                if rest < keep:
                    size, rest = found, 0
                if wanted < 0:
                    changes += size, -size
                    continue
                del free[place], sizes[address]
                if rest:
                    start = address + size
                    insort(free, rest << SHIFT | start)
                    sizes[start] = rest
                    ends[address + found] = start
                else:
                    del ends[address + found]
                spots[block] = address, size
                changes.append(size)
            else:
                address, size = spots.pop(block)
                changes.append(-size)
                end = address + size
                after = sizes.pop(end, 0)
                if after:
                    del free[bisect_left(free, after << SHIFT | end)]
                    end += after
                before = ends.pop(address, None)
                if before is not None:
                    del free[bisect_left(free, sizes[before] << SHIFT | before)]
                    address = before
                insort(free, (end - address) << SHIFT | address)
                sizes[address], ends[end] = end - address, address
        return changes, chosen

    def _added(self, address: int, length: int, size: int) -> int:
        """Add a new segment; gives the place of what ``size`` bytes are then taken from."""
        self.add(address, length)
        return bisect_left(self._free, size << SHIFT)

    def free_before(self, end: int) -> int:
        """Bytes of the free interval that ends at an address."""
        if self._restored:
            self._own()
        start = self._ends.get(end)
        return 0 if start is None else end - start

    def add(self, address: int, length: int) -> None:
        """Add a new segment."""
        self._segments[address] = length
        self.give(address, length)

    def shrink(self) -> int:
        """Drop the segments that are free as a whole; gives their bytes."""
        self._own()
        whole = [address for address, length in self._segments.items() if self._sizes.get(address) == length]
        gone = 0
        for address in whole:
            length = self._segments.pop(address)
            del self._free[bisect_left(self._free, length << SHIFT | address)]
            del self._sizes[address], self._ends[address + length]
            gone += length
        return gone

    def save(self) -> State:
        """What is free now."""
        if self._state is None:
            self._state = State(tuple(self._free))
        return self._state

    def restore(self, state: State) -> None:
        """Make that free which ``state`` says, and nothing else; segments made since are gone."""
        self._state, self._restored = state, True
        self._free = list(state.free)

    def _own(self) -> None:
        """Before a change: leave the state to whoever saved it."""
        if self._state is not None and self._restored:
            sizes, ends = self._state.places()
            self._sizes, self._ends = dict(sizes), dict(ends)
        self._state, self._restored = None, False
