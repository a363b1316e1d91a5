"""Runs the requests of a whole pass at once, and remembers what they did.

A pass makes thousands of requests, and a step makes the same pass for every micro-batch. What a row of requests does
depends on nothing but the free intervals that it finds, so where it finds the same again it does the same again, and
leaves the same intervals. Small and large blocks have nothing to do with each other until the device is full: then the
requests are made one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from gpipe_bench.simulator.memory.allocator import Allocator, Block
from gpipe_bench.simulator.memory.pass_requests import PassRequests
from gpipe_bench.simulator.memory.pools import ADDRESS, SHIFT, Larger, Pool, State, rounded
from gpipe_bench.simulator.memory.request_rows import Done, Full, Row
from gpipe_bench.simulator.workloads.workload import MemoryOp

__all__ = ["Placed", "Program"]


class Placed:
    """Blocks that a program left in use: those of the small pool, and those of the large one.

    Attributes:
        done: what was done to both pools.
        used: by how much the bytes in use changed.
        peak: by how much they grew on the way, at the most.
        exact: whether they grew as much.
    """

    __slots__ = ("done", "exact", "peak", "used")

    def __init__(self, done: tuple[Done, Done], used: int, peak: int, *, exact: bool = True) -> None:
        self.done, self.used, self.peak, self.exact = done, used, peak, exact

    def block(self, name: int, requested: int, owner: Allocator, stream: int) -> Block:
        """One of them as a block of the allocator."""
        interval = self.interval(name)
        return Block(owner, interval & ADDRESS, interval >> SHIFT, requested, stream)

    def interval(self, name: int) -> int:
        """Where one of them is; 0 where bytes are only counted."""
        small, large = self.done
        return small.blocks.get(name) or large.blocks[name]


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
        requests: to the small pool, and to the large one, in columns.
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
        asked = PassRequests({**(before or {}), **lent}, {*awaited, *lent})
        asked.add(ops)
        held = asked.alive.keys() if kept is None else set(kept)
        asked.add([MemoryOp("free", block) for block in asked.alive if block not in held])
        live, used = (list(accumulate(changes, initial=0)) for changes in (asked.live, asked.used))
        self.live, self.live_peak = live[-1] + sum(lent.values()), max(live)
        self.left, self.outstanding = asked.alive, tuple(name for name in asked.outstanding if name not in lent)
        # Where every block has the size that was asked for.
        self._used = used[-1] + sum(rounded(lent[name]) for name in asked.outstanding if name in lent)
        self._peak = max(used)
        self.requests = asked.rows
        self._asked, self._asks = asked, any(blocks for blocks, _ in asked.rows)
        self._rows = [Row(requests, small=not pool) for pool, requests in enumerate(asked.rows)]
        # What is known to come of what was found free in both pools.
        self._placed: dict[object, Placed] = {}
        nothing = State(())
        self._nowhere = Placed((Done(nothing, {}), Done(nothing, dict.fromkeys(self.left, 0))), 0, 0)

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
        if not placed.exact and allocator.allocated + placed.peak > allocator.peak_allocated:
            # A block of the small pool is never larger than what was asked for.
            placed.peak = self._asked.peak(placed.done[1].larger, _extra(incoming))
            placed.exact = True
        allocator.count(self.live, placed.used, self.live_peak, placed.peak)
        return placed

    def _place(self, allocator: Allocator, pools: tuple[Pool, Pool], incoming: Placed | None) -> Placed | None:
        """Make the requests, those to one pool after those to the other."""
        before = incoming.done if incoming else (None, None)
        try:
            with allocator.attempt(pools):
                small, large = (
                    row.run(allocator, pool, own) for row, pool, own in zip(self._rows, pools, before, strict=True)
                )
        except Full:
            return None
        extra = _extra(incoming)
        used, peak = self._in_use(large.extra, extra), self._peak + sum(more for _, more in large.larger)
        return Placed((small, large), used, peak, exact=not large.larger and not extra)

    def sums(self, larger: Larger, left: Mapping[int, int], before: Mapping[int, int]) -> tuple[int, int]:
        """By how much the bytes in use change, and how much they grow on the way.

        Args:
            larger: takes of large blocks that got more than they asked for: their numbers, and the bytes too many.
            left: of large blocks that are left in use, the bytes that they have too many.
            before: of large blocks that were in use before, the same.
        """
        return self._in_use(left, before), self._asked.peak(larger, before)

    def _in_use(self, left: Mapping[int, int], before: Mapping[int, int]) -> int:
        let_go = sum(before.get(name, 0) for name in self.outstanding)
        return self._used + sum(left.values()) - sum(before.values()) - let_go


def _extra(placed: Placed | None) -> Mapping[int, int]:
    """What large blocks in use got too much."""
    return placed.done[1].extra if placed is not None else {}
