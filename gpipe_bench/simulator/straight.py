"""Passes one after the other on the memory that is there, where looking them up finds nothing.

While a host thread runs ahead of its device more and more is on its way, and no state is like one before. Then passes
are made where they are, without states between them, and most of them by nothing but their requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpipe_bench.simulator.allocator import Allocator, Block
from gpipe_bench.simulator.pool_states import Automaton, State
from gpipe_bench.simulator.pools import ADDRESS, SHIFT
from gpipe_bench.simulator.pools import State as Free
from gpipe_bench.simulator.programs import Placed, Program
from gpipe_bench.simulator.request_rows import Done
from gpipe_bench.simulator.steps import NO_BLOCK
from gpipe_bench.simulator.tables import Integers

__all__ = ["QuickPass", "Straight", "left_in_use"]

_MISSES: Final = 24
"""New states in a row after which the next ones are not kept."""

_AGAIN: Final = 4
"""The same after some have not been kept."""

_PASSES: Final = 64
"""For how many passes, the first time; then for twice as many each time."""

_STREAM: Final = 0
_NOTHING: Final = Free(())


class QuickPass:
    """The requests of a pass, to be made without being looked up.

    Args:
        name: of the pass.
        program: what it asks for.
        allocator: without limit.
        names: of the blocks of tensors that it gives out, as in :class:`gpipe_bench.simulator.workload.TaskWork`.
        sizes: bytes of these tensors.

    Attributes:
        name: as above.
    """

    def __init__(
        self, name: str, program: Program, allocator: Allocator, names: Sequence[int], sizes: Sequence[int]
    ) -> None:
        self.name = name
        self._program, self._allocator = program, allocator
        self._small, self._large = program.requests
        self._pools = allocator.pools(_STREAM)
        named = enumerate(zip(names or (NO_BLOCK,) * len(sizes), sizes, strict=False))
        self._given = [(place, block, nbytes) for place, (block, nbytes) in named if block >= NO_BLOCK]
        self._sums: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}

    def make(self, small: dict[int, int], large: dict[int, int]) -> tuple[dict[int, int], dict[int, int]]:
        """Make the requests; ``small`` and ``large`` are blocks in use by name, which become those left in use."""
        grow, program = self._allocator.segment, self._program
        changes: list[tuple[int, ...]] = [(), ()]
        if self._small:
            changes[0] = tuple(self._pools[0].replay(self._small, small, grow)[0])
        if self._large:
            changes[1] = tuple(self._pools[1].replay(self._large, large, grow)[0])
        key = changes[0], changes[1]
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = program.sums(*key)
        self._allocator.count(program.live, sums[0], program.live_peak, sums[1])
        return small, large

    def give_out(self, small: dict[int, int], large: dict[int, int]) -> dict[int, Block]:
        """Blocks for the tensors that are given out, by place: those left in use, or new ones."""
        found: dict[int, Block] = {}
        blocks: dict[int, Block] = {}
        allocator = self._allocator
        for place, name, nbytes in self._given:
            interval = small.get(name) or large.get(name)
            if interval is None:
                found[place] = allocator.alloc(nbytes, _STREAM)
                continue
            if name not in blocks:
                blocks[name] = Block(
                    allocator, interval & ADDRESS, interval >> SHIFT, self._program.left[name], _STREAM
                )
            found[place] = blocks[name]
        return found


def left_in_use(blocks: tuple[dict[int, int], dict[int, int]]) -> Placed:
    """Blocks of the small and the large pool as what a program left."""
    small, large = blocks
    return Placed((Done(_NOTHING, small, ()), Done(_NOTHING, large, ())), 0, 0)


class Straight(Automaton):
    """An automaton that can do without states."""

    def __init__(self, queues: int, ways: int = 1) -> None:
        super().__init__(queues, ways)
        self._row_numbers: dict[tuple[int, ...], int] = {}
        self._read: dict[int, tuple[int, Sequence[int | tuple[int, ...]]]] = {}

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

    def quick(self, number: int) -> tuple[int, ...] | None:
        """Run a pass by its requests, from and to :attr:`held`: its row, or None if it is not that plain."""
        raise NotImplementedError

    def _go_on(self, state: State, codes: Sequence[int], taken: list[int]) -> State:
        allocator = self.allocator
        allocator.restore(state.free)
        self.queues, self.held = list(state.queues), state.held
        for code in codes:
            read = self._read.get(code)
            if read is None:
                read = self._read[code] = self.decoded(code)
            number, backs = read
            self.come_back(backs)
            row = self.quick(number)
            if row is None:
                allocator.begin()
                on_way = self.call(number)
                row = *allocator.used(), *self.sizes(on_way)
            taken.append(self._row_number(row))
        return self.enter(tuple(self.queues), self.held)

    def _row_number(self, row: tuple[int, ...]) -> int:
        number = self._row_numbers.get(row)
        if number is None:
            number = self._row_numbers[row] = self.add_row(row, self.start)
        return number
