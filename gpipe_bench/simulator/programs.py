"""Runs the requests of a whole pass at once, and remembers what they did.

A pass makes thousands of requests, and a step makes the same pass for every micro-batch. What a row of requests does
depends on nothing but the free intervals that it finds, so where it finds the same again it does the same again, and
leaves the same intervals. Small and large blocks have nothing to do with each other until the device is full: then the
requests are made one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, count
from operator import itemgetter

from gpipe_bench.simulator.allocator import Allocator, Block
from gpipe_bench.simulator.pools import ADDRESS, SHIFT, SMALL, Pool, Request, State, rounded
from gpipe_bench.simulator.request_rows import Done, Full, Row
from gpipe_bench.simulator.workload import MemoryOp

__all__ = ["Placed", "Program"]


class Placed:
    """Blocks that a program left in use: those of the small pool, and those of the large one.

    Attributes:
        done: what was done to both pools.
        used: by how much the bytes in use changed.
        peak: by how much they grew on the way.
    """

    __slots__ = ("done", "peak", "used")

    def __init__(self, done: tuple[Done, Done], used: int, peak: int) -> None:
        self.done, self.used, self.peak = done, used, peak

    def block(self, name: int, requested: int, owner: Allocator, stream: int) -> Block:
        """One of them as a block of the allocator."""
        interval = self.interval(name)
        return Block(owner, interval & ADDRESS, interval >> SHIFT, requested, stream)

    def interval(self, name: int) -> int:
        """Where one of them is; 0 where bytes are only counted."""
        small, large = self.done
        return small.blocks.get(name) or large.blocks[name]


class _Rows:
    """Requests to the small pool, and those to the large one.

    Args:
        alive: blocks in use when they begin, with their bytes.
        awaited: which of them do not come back when they are given back.

    Attributes:
        alive: blocks in use.
        requests: in order, for each pool.
        pools: of each take and give: 0 or 1, and 2 for blocks that do not come back.
        live: by how much the bytes asked for change with each take and give.
        outstanding: blocks that do not come back, in the order in which they are given back.
    """

    def __init__(self, alive: dict[int, int], awaited: Collection[int]) -> None:
        self.alive = alive
        self.requests: tuple[list[Request], list[Request]] = ([], [])
        self.pools = bytearray()
        self.live: list[int] = []
        self.outstanding: list[int] = []
        self._awaited = awaited

    def add(self, ops: Iterable[MemoryOp]) -> None:
        """Add what a pass asks for."""
        alive, requests, pools, live = self.alive, self.requests, self.pools, self.live
        for kind, block, nbytes in ops:
            if kind == "alloc":
                alive[block] = nbytes
                live.append(nbytes)
                pool, wanted = _wanted(nbytes)
                requests[pool].append((block, wanted))
                pools.append(pool)
            elif kind == "scratch":
                live += nbytes, -nbytes
                pool, wanted = _wanted(nbytes)
                requests[pool].append((-1, -wanted))
                pools += b"\1\1" if pool else b"\0\0"
            else:
                given = alive.pop(block)
                live.append(-given)
                pools.append(self._give(block, given > SMALL))

    def _give(self, block: int, pool: bool) -> int:
        if block in self._awaited:
            self.outstanding.append(block)
            return 2
        row = self.requests[pool]
        if row and row[-1][0] == block and row[-1][1] > 0:
            # At once, so that nothing changes in between.
            row[-1] = block, -row[-1][1]
        else:
            row.append((block, 0))
        return pool

    def order(self) -> list[int]:
        """Places of all takes and gives among those of both rows and the outstanding blocks, one after the other."""
        counts = [self.pools.count(pool) for pool in range(3)]
        places = count(), count(counts[0]), count(counts[0] + counts[1])
        return list(map(next, map(places.__getitem__, self.pools)))


@cache
def _wanted(nbytes: int) -> tuple[bool, int]:
    """Whether a request goes to the large pool, and what it takes there."""
    return nbytes > SMALL, rounded(nbytes) << SHIFT


class Program:
    """The requests of a pass, the blocks that it leaves aside, and at its end it gives back everything else.

    Args:
        ops: the requests.
        kept: blocks that are not given back; None for all that is left.
        before: blocks in use when the program starts, with their bytes.
        awaited: blocks among those that other streams still use, so that their memory comes back after the program.
        lent: blocks of others with their bytes, which the program is the last one to need. It lets go of them where it
            frees them; whoever runs it gives them back afterwards.

    Attributes:
        outstanding: those of them that it gave back, so that they count as in use no more.
        requests: to the small pool, and to the large one.
    """

    def __init__(
        self,
        ops: Sequence[MemoryOp],
        *,
        kept: Iterable[int] | None,
        before: Mapping[int, int] | None = None,
        awaited: Collection[int] = (),
        lent: Mapping[int, int] | None = None,
    ) -> None:
        lent = lent or {}
        rows = _Rows({**(before or {}), **lent}, {*awaited, *lent})
        rows.add(ops)
        held = rows.alive.keys() if kept is None else set(kept)
        rows.add([MemoryOp("free", block) for block in rows.alive if block not in held])
        live = list(accumulate(rows.live, initial=0))
        self.live, self.live_peak = live[-1] + sum(lent.values()), max(live)
        self.left, self.outstanding = rows.alive, tuple(name for name in rows.outstanding if name not in lent)
        self._let_go = [(name, rounded(lent[name]) if name in lent else 0) for name in rows.outstanding]
        self.requests = rows.requests
        self._rows = [Row(requests) for requests in rows.requests]
        self._asks = any(rows.requests)
        order = rows.order()
        # Of what is in the order of both rows and the outstanding blocks, one after the other, to that of the program.
        self._in_order = itemgetter(*order) if len(order) > 1 else tuple
        # What is known to come of what was found free in both pools.
        self._placed: dict[object, Placed] = {}
        self._sums: dict[tuple[int, int, tuple[int, ...]], tuple[int, int]] = {}
        nothing = State(())
        self._nowhere = Placed((Done(nothing, {}, ()), Done(nothing, dict.fromkeys(self.left, 0), ())), 0, 0)

    def run(self, allocator: Allocator, stream: int, incoming: Placed | None = None) -> Placed | None:
        """Make the requests on a stream.

        Args:
            allocator: of the device.
            stream: whose pools.
            incoming: where the blocks are that were in use before.

        Returns:
            What is left in use; None, with nothing done, if the device is too full to make them in one go.
        """
        if allocator.tallies:
            allocator.count(self.live, 0, self.live_peak, 0)
            return self._nowhere
        if self._asks:
            allocator.collect()
        small, large = pools = allocator.pools(stream)
        key = small.save(), large.save(), incoming
        placed = self._placed.get(key)
        if placed is None:
            placed = self._place(allocator, pools, incoming)
            if placed is None:
                return None
            if not placed.done[0].grown and not placed.done[1].grown:
                self._placed[key] = placed
        else:
            small.restore(placed.done[0].state)
            large.restore(placed.done[1].state)
        allocator.count(self.live, placed.used, self.live_peak, placed.peak)
        return placed

    def _place(self, allocator: Allocator, pools: tuple[Pool, Pool], incoming: Placed | None) -> Placed | None:
        """Make the requests, those to one pool after those to the other."""
        try:
            with allocator.attempt(pools):
                done = [
                    row.run(allocator, pool, incoming.done[index] if incoming else None)
                    for index, (row, pool) in enumerate(zip(self._rows, pools, strict=True))
                ]
        except Full:
            return None
        outstanding = (
            tuple(-(size or incoming.interval(block) >> SHIFT) for block, size in self._let_go) if incoming else ()
        )
        used, peak = self._in_use(done[0].changes, done[1].changes, outstanding)
        return Placed((done[0], done[1]), used + sum(size for _, size in self._let_go), peak)

    def _in_use(self, small: tuple[int, ...], large: tuple[int, ...], outstanding: tuple[int, ...]) -> tuple[int, int]:
        """By how much the bytes in use changed, and how much they grew on the way."""
        # The first two are kept for as long as the program is.
        key = id(small), id(large), outstanding
        if key not in self._sums:
            self._sums[key] = self.sums(small, large, outstanding)
        return self._sums[key]

    def sums(
        self, small: tuple[int, ...], large: tuple[int, ...], outstanding: tuple[int, ...] = ()
    ) -> tuple[int, int]:
        """What takes and gives that change the bytes in use by so much come to, and the most on the way."""
        sums = list(accumulate(self._in_order(small + large + outstanding), initial=0))
        return sums[-1], max(sums)
