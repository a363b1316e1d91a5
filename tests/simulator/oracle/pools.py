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
from typing import Final

__all__ = ["MIB", "SMALL", "Pool", "rounded", "segment_length"]

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


def rounded(nbytes: int) -> int:
    """Bytes that a request takes."""
    return -(-nbytes // MIN_BLOCK) * MIN_BLOCK or MIN_BLOCK


def segment_length(size: int) -> int:
    """Bytes of the segment that is made for a block of ``size``."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUND_LARGE) * ROUND_LARGE


class Pool:
    """The free intervals of one stream and one class of sizes.

    Args:
        small: which class.

    Attributes:
        keep: least bytes that are split off.
    """

    __slots__ = ("_ends", "_free", "_segments", "_starts", "keep")

    def __init__(self, *, small: bool) -> None:
        self.keep = MIN_BLOCK if small else SMALL + 1
        # The intervals in order, by start and by end.
        self._free: list[int] = []
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._segments: dict[int, int] = {}

    def take(self, size: int) -> tuple[int, int] | None:
        """Address and size of a block for ``size`` bytes; None if no free interval is large enough."""
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

    def add(self, address: int, length: int) -> None:
        """Add a new segment."""
        self._segments[address] = length
        self.give(address, length)

    def shrink(self) -> int:
        """Drop the segments that are free as a whole; gives their bytes."""
        whole = [start for start, length in self._segments.items() if self._starts.get(start, 0) >> SHIFT == length]
        gone = 0
        for start in whole:
            length = self._segments.pop(start)
            del self._free[bisect_left(self._free, self._starts.pop(start))], self._ends[start + length]
            gone += length
        return gone
