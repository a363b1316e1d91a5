"""Passes one after the other on the memory that is there, where looking them up finds nothing.

While a host thread runs ahead of its device more and more is on its way, and no state is like one before. Then passes
are made where they are, without states of the device between them, and most of them by nothing but their requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from gpipe_bench.simulator.known_order.step_times import Integers
from gpipe_bench.simulator.memory.pools import ADDRESS, SHIFT, SMALL, Request, rounded
from gpipe_bench.simulator.memory.programs import Program
from gpipe_bench.simulator.memory.request_rows import Done
from gpipe_bench.simulator.memory_states.free_states import FreePool, Made
from gpipe_bench.simulator.memory_states.pool_states import Automaton, Group, State
from gpipe_bench.simulator.tracing.steps import NO_BLOCK

__all__ = ["LONG", "Out", "QuickPass", "Spots", "Straight"]

_MISSES: Final = 12
"""New states in a row after which the next ones are not kept."""

_AGAIN: Final = 2
"""The same after some have not been kept."""

_PASSES: Final = 64
"""For how many passes, the first time; then for twice as many each time."""

LONG: Final = 100
"""Requests of a pass from which on looking up its parts is faster."""

_STREAM: Final = 0
_NO_BLOCKS: Final[dict[int, int]] = {}
_NEW: Final = 2**41
"""From there on names of blocks that are made when a pass has ended."""

Spots = dict[int, tuple[int, int, int]]
"""Address, size and bytes asked for of blocks, by the place of their tensor among what a task gives out."""


class Out(NamedTuple):
    """What a pass puts on its way.

    Attributes:
        groups: with the queue of each.
        row: of the pass, see :class:`gpipe_bench.simulator.memory_states.pool_states.Bytes`.
    """

    groups: list[tuple[int, Group]]
    row: int


class QuickPass:
    """The requests of a pass, to be made without being looked up.

    Args:
        name: of the pass.
        program: what it asks for.
        names: of the blocks of tensors that it gives out, as in
        :class:`gpipe_bench.simulator.workloads.workload.TaskWork`. sizes: bytes of these tensors.

    Attributes:
        name: as above.
        rows: number of its row by the numbers of changes, for whoever runs the pass.
        out: what is put on its way, by what requests left; likewise.
    """

    def __init__(self, name: str, program: Program, names: Sequence[int], sizes: Sequence[int]) -> None:
        self.name = name
        self.rows: dict[tuple[int, int], int] = {}
        self.out: dict[tuple[int, int], tuple[tuple[Made, Made], Out]] = {}
        self._program = program
        requests: tuple[list[Request], list[Request]]
        requests = list(zip(*program.requests[0], strict=True)), list(zip(*program.requests[1], strict=True))
        # Takes of large blocks.
        self._takes = sum(wanted != 0 for _, wanted in requests[1])
        # What is made at the end: of which pool, and bytes asked for.
        self._new: list[tuple[bool, int]] = []
        self._given: list[tuple[int, int, int]] = []
        for place, (name_of, nbytes) in enumerate(zip(names or (NO_BLOCK,) * len(sizes), sizes, strict=False)):
            if name_of == NO_BLOCK:
                large = nbytes > SMALL
                requests[large].append((_NEW + place, rounded(nbytes) << SHIFT))
                self._new.append((large, nbytes))
                self._given.append((place, _NEW + place, nbytes))
            elif name_of > NO_BLOCK:
                self._given.append((place, name_of, program.left[name_of]))
        self._requests = requests
        self._sums: dict[int, tuple[int, int, int, int]] = {}

    def make(self, pools: Sequence[FreePool], before: Sequence[Made | Done] = ()) -> tuple[Made, Made]:
        """Make the requests; ``before``: what left blocks in use."""
        (small, large), (few, many) = pools, self._requests
        if not before:
            return small.make(few, _NO_BLOCKS, {}), large.make(many, _NO_BLOCKS, {})
        return small.make(few, before[0].blocks, {}), large.make(many, before[1].blocks, before[1].extra)

    def used(self, pools: Sequence[FreePool], made: tuple[Made, Made]) -> tuple[int, int, int, int]:
        """By how much bytes in use change, and how much they grow on the way; as allocated and as asked for."""
        # A small block is never larger than was asked for.
        large = made[1]
        found = self._sums.get(large.changes)
        if found is None:
            larger, before = pools[1].changes(large.changes)
            own = [(number, more) for number, more in larger if number < self._takes]
            left = {name: more for name, more in large.extra.items() if name < _NEW}
            used, peak = self._program.sums(own, left, dict(before))
            live, live_peak = self._program.live, self._program.live_peak
            extra, number = dict(larger), self._takes
            for is_large, nbytes in self._new:
                used, live = used + rounded(nbytes) + (extra.get(number, 0) if is_large else 0), live + nbytes
                number += is_large
                peak, live_peak = max(peak, used), max(live_peak, live)
            found = self._sums[large.changes] = used, peak, live, live_peak
        return found

    def spots(self, made: tuple[Made, Made]) -> Spots:
        """Where the blocks are that are given out."""
        found: Spots = {}
        for place, name, nbytes in self._given:
            interval = made[0].blocks.get(name) or made[1].blocks[name]
            found[place] = interval & ADDRESS, interval >> SHIFT, nbytes
        return found


class Straight(Automaton, ABC):
    """An automaton that can do without states.

    Attributes:
        pools: the small and the large one, while it does.
        remembered: the same, once it has.
    """

    pools: tuple[FreePool, FreePool] | None = None

    def __init__(self, queues: int, ways: int = 1) -> None:
        super().__init__(queues, ways)
        self._row_numbers: dict[tuple[int, ...], int] = {}
        self._read: dict[int, tuple[int, Sequence[int | tuple[int, ...]]]] = {}
        self.remembered: tuple[FreePool, FreePool] | None = None

    def follow(self, codes: Integers) -> tuple[list[int], State]:
        """Transitions, and rows of passes that are no transitions."""
        taken, state, listed = list[int](), self.start, codes.tolist()
        place, misses, count = 0, 0, _PASSES
        while place < len(listed):
            number = state.next.get(listed[place])
            if number is None:
                misses += 1
                if misses > _MISSES:
                    state = self._go_on(state, listed[place : place + count], taken)
                    place, misses, count = place + count, _MISSES - _AGAIN, 2 * count
                    continue
                number = state.next[listed[place]] = self.step(state, listed[place])
            else:
                misses = 0
            taken.append(number)
            state = self.targets[number]
            place += 1
        return taken, state

    @abstractmethod
    def quick(self, number: int) -> int | None:
        """Run a pass by its requests, from and to :attr:`held`: the number of its row, or None."""

    @abstractmethod
    def settle(self) -> None:
        """Leave to :attr:`held` what quick passes kept aside."""

    def forget(self) -> None:
        """Let go of what was done without states; nothing can be run afterwards."""
        for pool in self.remembered or ():
            pool.forget()

    def row_number(self, row: tuple[int, ...]) -> int:
        """The number of a row."""
        number = self._row_numbers.get(row)
        if number is None:
            number = self._row_numbers[row] = self.add_row(row, self.start)
        return number

    def give(self, group: Group) -> None:
        """Blocks come back."""
        if self.pools is None:
            super().give(group)
            return
        for address, size, _ in group:
            self.pools[size > SMALL].give(address, size)

    def _go_on(self, state: State, codes: Sequence[int], taken: list[int]) -> State:
        allocator = self.allocator
        allocator.restore(state.free)
        self.queues, self.held = [deque(queue) for queue in state.queues], state.held
        pools = self.pools = self._open_pools()
        known, quick, come_back = self._read, self.quick, self.come_back
        for code in codes:
            read = known.get(code)
            if read is None:
                read = known[code] = self.decoded(code)
            number, backs = read
            come_back(backs)
            row = quick(number)
            if row is None:
                self._close_pools()
                self.settle()
                allocator.begin()
                on_way = self.call(number)
                row = self.row_number((*allocator.used(), *self.sizes(on_way)))
                self.pools = pools
                for pool in pools:
                    pool.enter()
            taken.append(row)
        self._close_pools()
        self.settle()
        return self.enter(self.queues, self.held)

    def _open_pools(self) -> tuple[FreePool, FreePool]:
        if self.remembered is None:
            small, large = self.allocator.pools(_STREAM)
            self.remembered = FreePool(small, self.allocator.segment), FreePool(large, self.allocator.segment)
        for pool in self.remembered:
            pool.enter()
        return self.remembered

    def _close_pools(self) -> None:
        for pool in self.pools or ():
            pool.leave()
        self.pools = None
