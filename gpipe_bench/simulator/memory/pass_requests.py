"""The requests of a pass, told apart by pool: what they ask for, in which order, and what they would take.

order     + small   + large   - large   + small    ...         bytes in use by requests that get what they ask for
small     + small                       + small
large               + large   - large
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from itertools import accumulate

from gpipe_bench.simulator.memory.pools import SHIFT, SMALL, Larger, Requests, rounded
from gpipe_bench.simulator.workloads.workload import MemoryOp

__all__ = ["PassRequests"]

_OUTSTANDING = 2


class _Sizes(dict[int, tuple[int, int, int]]):
    """Bytes -> the pool that they come from (1: that of large blocks), bytes taken there, and the same shifted."""

    def __missing__(self, nbytes: int) -> tuple[int, int, int]:
        size = rounded(nbytes)
        self[nbytes] = found = int(nbytes > SMALL), size, size << SHIFT
        return found


_sizes = _Sizes()


class PassRequests:
    """Requests to the small pool, and those to the large one.

    Args:
        alive: blocks in use when they begin, with their bytes.
        awaited: which of them do not come back when they are given back.

    Attributes:
        alive: blocks in use.
        rows: for each pool, in columns, which are read faster than as many pairs.
        live: by how much the bytes asked for change with each take and give.
        used: by how much the bytes taken change, where nobody gets more than that.
        outstanding: blocks that do not come back, in the order in which they are given back.
    """

    def __init__(self, alive: dict[int, int], awaited: Collection[int]) -> None:
        self.alive = alive
        self.rows: tuple[Requests, Requests] = ([], []), ([], [])
        self.live: list[int] = []
        self.used: list[int] = []
        self.outstanding: list[int] = []
        # Of each take and give: 0 or 1, and 2 for blocks that do not come back.
        self._pools = bytearray()
        self._awaited = awaited
        self._peaks: dict[object, int] = {}

    def add(self, ops: Iterable[MemoryOp]) -> None:
        """Add what a pass asks for."""
        alive, awaited, sizes, rows = self.alive, self._awaited, _sizes, self.rows
        live, used, pools = self.live, self.used, self._pools
        for kind, block, nbytes in ops:
            if kind == "alloc":
                alive[block] = nbytes
                pool, size, wanted = sizes[nbytes]
                live.append(nbytes)
                used.append(size)
                blocks, wants = rows[pool]
                blocks.append(block)
                wants.append(wanted)
            elif kind == "scratch":
                pool, size, wanted = sizes[nbytes]
                live += nbytes, -nbytes
                used += size, -size
                blocks, wants = rows[pool]
                blocks.append(-1)
                wants.append(-wanted)
                pools.append(pool)
            else:
                given = alive.pop(block)
                pool, size, _ = sizes[given]
                live.append(-given)
                used.append(-size)
                blocks, wants = rows[pool]
                if block in awaited:
                    self.outstanding.append(block)
                    pool = _OUTSTANDING
                elif blocks and blocks[-1] == block and wants[-1] > 0:
                    # At once, so that nothing changes in between.
                    wants[-1] = -wants[-1]
                else:
                    blocks.append(block)
                    wants.append(0)
            pools.append(pool)

    def peak(self, larger: Larger, extra: Mapping[int, int]) -> int:
        """By how much the bytes taken grow on the way.

        Args:
            larger: takes of large blocks that got more than they asked for: their numbers, and the bytes too many.
            extra: of large blocks that were in use before, the bytes that they have too many.
        """
        key = tuple(larger), tuple(extra.items())
        if key not in self._peaks:
            changes = self.used.copy()
            taken, given = self._places
            for number, more in larger:
                start, *end = taken[number]
                changes[start] += more
                for place in end:
                    changes[place] -= more
            for block, more in extra.items():
                if block in given:
                    changes[given[block]] -= more
            self._peaks[key] = max(accumulate(changes, initial=0))
        return self._peaks[key]

    @cached_property
    def _places(self) -> tuple[list[list[int]], dict[int, int]]:
        """Of each take of a large block the places in the order where it is taken and given; where others are given."""
        large, outstanding = ([p for p, pool in enumerate(self._pools) if pool == which] for which in (1, _OUTSTANDING))
        given = dict(zip(self.outstanding, outstanding, strict=True))
        taken: list[list[int]] = []
        places, open_blocks = iter(large), dict[int, list[int]]()
        for block, wanted in zip(*self.rows[1], strict=True):
            place = next(places)
            if wanted:
                taken.append([place] if wanted > 0 else [place, next(places)])
                if wanted > 0:
                    open_blocks[block] = taken[-1]
            elif block in open_blocks:
                open_blocks.pop(block).append(place)
            else:
                given[block] = place
        return taken, given
