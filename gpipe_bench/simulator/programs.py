"""Runs the requests of a whole pass at once, and remembers what they did.

A pass makes thousands of requests, and a step makes the same pass for every micro-batch. What a row of requests does
depends on nothing but the free intervals that it finds, so where it finds the same again it does the same again, and
leaves the same intervals. Small and large blocks have nothing to do with each other until the device is full: then the
requests are made one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from gpipe_bench.simulator.allocator import Allocator, Block
from gpipe_bench.simulator.pools import SMALL, Pool, Request, Spot, State, rounded
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
        return Block(owner, *self.spot(name), requested, stream)

    def spot(self, name: int) -> Spot:
        """Where one of them is."""
        small, large = self.done
        return small.spots.get(name) or large.spots[name]


class _Rows:
    """Requests to the small pool, and those to the large one.

    Args:
        before: blocks in use when they begin, with their bytes.
        awaited: which of them do not come back when they are given back.

    Attributes:
        requests: in order, for each pool.
        places: place of each take and give in the order of both, and of the blocks that do not come back.
        outstanding: blocks that do not come back, in the order in which they are given back.
    """

    def __init__(self, before: Mapping[int, int], awaited: Collection[int]) -> None:
        self.requests: tuple[list[Request], list[Request]] = ([], [])
        self.places: tuple[list[int], list[int], list[int]] = ([], [], [])
        self.outstanding: list[int] = []
        self._awaited = awaited
        self._large = {block: nbytes > SMALL for block, nbytes in before.items()}
        self._count = 0

    def take(self, block: int, nbytes: int) -> None:
        large = self._large[block] = nbytes > SMALL
        self.requests[large].append((block, rounded(nbytes)))
        self.places[large].append(self._count)
        self._count += 1

    def give(self, block: int) -> None:
        if block in self._awaited:
            self.outstanding.append(block)
            self.places[2].append(self._count)
        else:
            large = self._large[block]
            row = self.requests[large]
            if row and row[-1][0] == block and row[-1][1] > 0:
                # At once, so that nothing changes in between.
                row[-1] = block, -row[-1][1]
            else:
                row.append((block, 0))
            self.places[large].append(self._count)
        self._count += 1


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
        alive = {**(before or {}), **(lent or {})}
        rows = _Rows(alive, {*awaited, *(lent or ())})
        live = peak = 0
        for kind, block, nbytes in ops:
            if kind == "alloc":
                alive[block] = nbytes
                rows.take(block, nbytes)
                live += nbytes
                peak = max(peak, live)
            elif kind == "scratch":
                peak = max(peak, live + nbytes)
                rows.take(-1, nbytes)
                rows.give(-1)
            else:
                live -= alive.pop(block)
                rows.give(block)
        held = set(alive if kept is None else kept)
        for block in [block for block in alive if block not in held]:
            live -= alive.pop(block)
            rows.give(block)
        lent = lent or {}
        self.live, self.live_peak = live + sum(lent.values()), peak
        self.left, self.outstanding = alive, tuple(name for name in rows.outstanding if name not in lent)
        self._let_go = [(name, rounded(lent[name]) if name in lent else 0) for name in rows.outstanding]
        self._rows = [Row(requests) for requests in rows.requests]
        # From the order of both rows and the outstanding blocks one after the other to that of the program.
        places = [place for row in rows.places for place in row]
        self._order = sorted(range(len(places)), key=places.__getitem__)
        # What is known to come of what was found free in both pools.
        self._placed: dict[object, Placed] = {}
        self._sums: dict[tuple[int, int, tuple[int, ...]], Spot] = {}
        nothing = State(())
        self._nowhere = Placed((Done(nothing, {}, ()), Done(nothing, dict.fromkeys(alive, (0, 0)), ())), 0, 0)

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
        if self._rows[0].requests or self._rows[1].requests:
            allocator.collect()
        small, large = pools = allocator.pools(stream)
        key = small.save().free, large.save().free, incoming
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
        outstanding = tuple(-(size or incoming.spot(block)[1]) for block, size in self._let_go) if incoming else ()
        used, peak = self._in_use(done[0].changes, done[1].changes, outstanding)
        return Placed((done[0], done[1]), used + sum(size for _, size in self._let_go), peak)

    def _in_use(self, small: tuple[int, ...], large: tuple[int, ...], outstanding: tuple[int, ...]) -> Spot:
        """By how much the bytes in use changed, and how much they grew on the way."""
        # The first two are kept for as long as the program is.
        key = id(small), id(large), outstanding
        if key not in self._sums:
            changes = small + large + outstanding
            sums = list(accumulate(map(changes.__getitem__, self._order)))
            self._sums[key] = (sums[-1], max(0, *sums)) if sums else (0, 0)
        return self._sums[key]
