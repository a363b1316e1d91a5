"""Requests that leave nothing behind: whether they find room is known without making them.

A row that gives back all that it takes leaves free memory as it was, wherever its blocks were meanwhile. So of such a
row only one thing has to be known: that the pool gets no new segment for it. Suppose that a request for w bytes finds
no room while the row has C blocks in use, U bytes together. What is still free is in pieces shorter than w; sizes are
multiples of 512 bytes, so a piece has w - 512 at the most. An interval of s bytes in which c of the blocks lie has at
most c + 1 free pieces, so s is at most what they use of it and (c + 1) (w - 512). Of all intervals from w bytes on:

    sum of (s - (w - 512))  <=  U + C (w - 512)

Where the left is larger there is room, whichever intervals best fit has chosen. Blocks have the size that was asked for
where all that is left over is split off, as in pools of small blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.simulator.memory.pools import MIN_BLOCK, SHIFT, Requests

__all__ = ["Demands", "keeps_nothing"]


class Demands:
    """What a row of requests must find free, so that it surely gets along with it.

    Args:
        requests: in order; blocks that others took may be given back among them.
    """

    __slots__ = ("_least",)

    def __init__(self, requests: Requests) -> None:
        least: dict[int, int] = {}
        sizes: dict[int, int] = {}
        used = 0
        for block, wanted in zip(*requests, strict=True):
            if not wanted:
                used -= sizes.pop(block, 0)
                continue
            size = abs(wanted) >> SHIFT
            least[size] = max(least.get(size, 0), used + len(sizes) * (size - MIN_BLOCK))
            if wanted > 0:
                sizes[block] = size
                used += size
        # (w << SHIFT, w - 512, U + C (w - 512)), the one that is met last first.
        rows = ((size << SHIFT, size - MIN_BLOCK, bytes_) for size, bytes_ in least.items())
        self._least = sorted(rows, reverse=True)

    def met(self, free: Sequence[int]) -> bool:
        """Whether there is room for all of them in free intervals, given in order."""
        for wanted, piece, least in self._least:
            found = 0
            for interval in reversed(free):
                if interval < wanted:
                    return False
                found += (interval >> SHIFT) - piece
                if found > least:
                    break
            else:
                return False
        return True


def keeps_nothing(requests: Requests) -> bool:
    """Whether a row gives back all that it takes, and nothing that others took."""
    taken: set[int] = set()
    for block, wanted in zip(*requests, strict=True):
        if wanted > 0:
            taken.add(block)
        elif not wanted:
            if block not in taken:
                return False
            taken.remove(block)
    return not taken
