"""Runs the requests of a whole pass at once, and remembers what they did.

A pass makes thousands of requests, and a step makes the same pass for every micro-batch. What a row of requests does
depends on nothing but the free intervals that it finds, so where it finds the same again it does the same again, and
leaves the same intervals. Small and large blocks have nothing to do with each other until the device is full: then the
requests are made one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from gpipe_bench.simulator.allocator import Allocator, Block
from gpipe_bench.simulator.pools import SMALL, Pool, Request, Spot, State, rounded
from gpipe_bench.simulator.workload import MemoryOp

__all__ = ["Placed", "Program"]


class _Done:
    """What a row of requests did to one pool.

    Attributes:
        state: what it left free.
        spots: where the blocks are that are still in use.
        changes: of the bytes in use, by each request.
    """

    __slots__ = ("changes", "spots", "state")

    def __init__(self, state: State, spots: dict[int, Spot], changes: list[int]) -> None:
        self.state, self.spots, self.changes = state, spots, changes


class Placed:
    """Blocks that a program left in use: those of the small pool, and those of the large one."""

    __slots__ = ("done",)

    def __init__(self, done: tuple[_Done, _Done]) -> None:
        self.done = done

    def blocks(self, requested: Mapping[int, int], stream: int) -> dict[int, Block]:
        """The same as blocks of the allocator."""
        return {
            block: Block(*spot, requested[block], stream) for done in self.done for block, spot in done.spots.items()
        }


class Program:
    """The requests of a pass, the blocks that it leaves aside, and at its end it gives back everything else.

    Args:
        ops: the requests.
        kept: blocks that are not given back; None for all that is left.
        before: blocks in use when the program starts, with their bytes.
    """

    def __init__(
        self, ops: Sequence[MemoryOp], *, kept: Iterable[int] | None, before: Mapping[int, int] | None = None
    ) -> None:
        sizes = dict(before or {})
        alive = dict(sizes)
        requests: list[tuple[int, int]] = []
        live = peak = 0
        for op in ops:
            if op.kind == "alloc":
                sizes[op.block] = alive[op.block] = op.bytes
                requests.append((op.block, rounded(op.bytes)))
                live += op.bytes
                peak = max(peak, live)
            elif op.kind == "scratch":
                peak = max(peak, live + op.bytes)
                requests += [(-1 - op.block, rounded(op.bytes)), (-1 - op.block, 0)]
            else:
                live -= alive.pop(op.block)
                requests.append((op.block, 0))
        held = set(alive if kept is None else kept)
        for block in [block for block in alive if block not in held]:
            live -= alive.pop(block)
            requests.append((block, 0))
        self.live, self.live_peak = live, peak
        self.left = alive
        self._rows: tuple[list[Request], list[Request]] = ([], [])
        classes: dict[int, bool] = {block: rounded(size) > SMALL for block, size in sizes.items()}
        for place, (block, size) in enumerate(requests):
            if size:
                classes[block] = size > SMALL
            self._rows[classes[block]].append((place, block, size))
        places = [place for row in self._rows for place, _, _ in row]
        # From the order of both rows one after the other to that of the program.
        self._order = sorted(range(len(places)), key=places.__getitem__)
        self._known: tuple[dict[object, _Done], dict[object, _Done]] = ({}, {})
        self._sums: dict[tuple[_Done, _Done], Spot] = {}

    def run(self, allocator: Allocator, stream: int, incoming: Placed | None = None) -> Placed | None:
        """Make the requests on a stream.

        Args:
            allocator: of the device.
            stream: whose pools.
            incoming: where the blocks are that were in use before.

        Returns:
            What is left in use; None, with nothing done, if the device is too full to make them in one go.
        """
        if self._rows[0] or self._rows[1]:
            allocator.collect()
        pools = [allocator.pool(stream, small=small) for small in (True, False)]
        done = []
        try:
            with allocator.attempt(pools):
                for index, pool in enumerate(pools):
                    done.append(self._run(index, allocator, pool, incoming.done[index] if incoming else None))
        except _Full:
            return None
        pair = (done[0], done[1])
        used, peak = self._in_use(pair)
        allocator.count(self.live, used, self.live_peak, peak)
        return Placed(pair)

    def _run(self, index: int, allocator: Allocator, pool: Pool, incoming: _Done | None) -> _Done:
        before = pool.save()
        key = before[0], incoming
        known = self._known[index].get(key)
        if known is not None:
            pool.restore(known.state)
            return known
        spots = dict(incoming.spots) if incoming is not None else {}
        grown = False

        def grow(size: int) -> Spot:
            nonlocal grown
            grown = True
            if not allocator.fits(size):
                raise _Full
            return allocator.segment(size)

        changes = pool.replay(self._rows[index], spots, grow)
        done = _Done(pool.save(), spots, changes)
        if not grown:
            self._known[index][key] = done
        return done

    def _in_use(self, pair: tuple[_Done, _Done]) -> Spot:
        """By how much the bytes in use changed, and how much they grew on the way."""
        if pair not in self._sums:
            changes = pair[0].changes + pair[1].changes
            sums = list(accumulate(map(changes.__getitem__, self._order)))
            self._sums[pair] = (sums[-1], max(0, *sums)) if sums else (0, 0)
        return self._sums[pair]


class _Full(Exception):  # noqa: N818 - a signal inside this file
    """The device has no room for a new segment."""
