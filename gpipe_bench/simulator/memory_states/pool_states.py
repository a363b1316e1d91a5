"""One device's memory as an automaton: what a pass does to the free memory that it finds is found out once.

A pipeline does the same to every micro-batch. With the same memory free, the same blocks on their way and as many of
them come back since, a pass leaves the same: its state is known, and so are the bytes that it takes. In a steady state
few states follow each other again and again, on all devices whose work is alike.

    state ── (pass, blocks that came back) ──> state, bytes in use, their peak, bytes that are on their way now
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.simulator.known_order.step_times import Integers
from gpipe_bench.simulator.memory.allocator import Allocator, Block, Saved
from gpipe_bench.simulator.memory_states.come_backs import Backs
from gpipe_bench.simulator.virtual_time.streams import Event

__all__ = ["SEEN", "Automaton", "Bytes", "Group", "State", "spots"]

SEEN: Final = 2**15
"""More than the blocks of one kind that can come back at a time."""

Group = tuple[tuple[int, int, int], ...]
"""Blocks that come back together: address, size and bytes asked for."""

_Part = tuple[int | tuple[int, ...], ...]
"""Number of a pass, and of each queue how many groups come back before it, or which."""

_STREAM: Final = 0
_IN_CODE: Final = 3
"""Queues whose numbers find room in a code."""


class Bytes(NamedTuple):
    """By how much bytes in use change, and by how much they grow on the way: as allocated, and as asked for.

    Attributes:
        on_way: of what goes on its way, which is in use until it has been sent; as allocated.
        live_on_way: the same, as asked for.
    """

    allocated: int
    allocated_peak: int
    live: int
    live_peak: int
    on_way: int
    live_on_way: int


class State:
    """What is free, what is on its way, and what is held.

    Attributes:
        free: free memory.
        queues: groups of blocks that are on their way, first come first back, of each kind.
        held: what else later passes need.
        next: number of the pass and of what came back -> number of the transition.
    """

    __slots__ = ("free", "held", "next", "queues")

    def __init__(self, free: Saved, queues: tuple[tuple[Group, ...], ...], held: tuple[Any, ...]) -> None:
        self.free, self.queues, self.held = free, queues, held
        self.next: dict[int, int] = {}


class _Watch:
    """In place of a clock: says of all that is freed now whether it has come back already."""

    def __init__(self) -> None:
        self.passed = False

    def record(self, _number: int, event: Event) -> None:
        if self.passed:
            event.passed.append(event)

    def idle(self, _number: int) -> bool:
        return self.passed


class Automaton:
    """States and transitions, made as they are needed.

    A pass is a method; it gives what it leaves on its way, and what is held from then on.

    Args:
        queues: of blocks on their way.
        ways: in how many ways a pass leaves blocks that are told apart.

    Attributes:
        allocator: of the device.
        start: the first state; set by whoever derives from this.
        queues: while a pass runs, groups on their way.
        held: while a pass runs, what is held.
        calls: by number of a pass, its method and arguments.
        targets: by transition the state that it leads to.
    """

    start: State

    def __init__(self, queues: int, ways: int = 1) -> None:
        self.watch = _Watch()
        self.allocator = Allocator(self.watch)
        # They are part of every state.
        self.allocator.pools(_STREAM)
        self.targets: list[State] = []
        self.held: Any = ()
        # Of what goes on its way in several ways there are more columns.
        self._rows = np.zeros((64, len(Bytes._fields) + 2 * (ways - 1)), dtype=np.int64)
        self.queues: list[deque[Group]] = [deque() for _ in range(queues)]
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._numbers: dict[tuple[str, tuple[Any, ...]], int] = {}
        self._states: dict[Hashable, State] = {}
        self._same: dict[Hashable, Any] = {}
        self._known: dict[bytes, tuple[NDArray[np.int32], int]] = {}
        # Of codes below zero: -1 stands for the first part.
        self._parts: list[_Part] = []
        self._odd_codes: dict[_Part, int] = {}

    def number(self, name: str, *arguments: Any) -> int:
        """The number of a pass: a method, and what it is called with."""
        key = name, arguments
        if key not in self._numbers:
            self._numbers[key] = len(self.calls)
            self.calls.append(key)
        return self._numbers[key]

    def run(self, codes: Integers) -> tuple[Integers, int]:
        """What passes in a row do: the fields of :class:`Bytes` of each, (passes, 6), and all that is reserved.

        With more ways there are as many more columns like the last two.

        Args:
            codes: number of each pass, and in base :data:`SEEN` how many groups of each queue came back before it; or
                what :meth:`codes` has in place of that.
        """
        key = codes.tobytes()
        if key not in self._known:
            taken, state = self.follow(codes)
            self._known[key] = np.array(taken, dtype=np.int32), state.free.reserved
        numbers, reserved = self._known[key]
        return self._rows[numbers], reserved

    def follow(self, codes: Integers) -> tuple[list[int], State]:
        """Numbers of the transitions, and the last state."""
        taken, state, targets = [], self.start, self.targets
        for code in codes.tolist():
            number = state.next.get(code)
            if number is None:
                number = state.next[code] = self.step(state, code)
            taken.append(number)
            state = targets[number]
        return taken, state

    def push(self, item: Hashable, below: Any) -> Any:
        """A stack with one item more, the one object for it."""
        item = self.intern(item)
        return self._same.setdefault((id(item), id(below)), (item, below))

    def intern(self, value: Hashable) -> Any:
        """The one object for all that are equal to ``value``."""
        return self._same.setdefault(value, value)

    def block(self, spot: tuple[int, int, int]) -> Block:
        """A block in use."""
        address, size, requested = spot
        return Block(self.allocator, address, size, requested, _STREAM)

    def new(self, nbytes: int) -> Block:
        """A new block."""
        return self.allocator.alloc(nbytes, _STREAM)

    def enter(self, queues: Iterable[Iterable[Group]], held: tuple[Any, ...]) -> State:
        """The state that the allocator is in now."""
        free, waiting = self.allocator.save(), tuple(map(tuple, queues))
        # Held objects are there once, so that it does not take long to tell them apart.
        on_way = (tuple(map(id, queue)) for queue in waiting)
        key = *((small.free, large.free) for small, large in free.pools.values()), *free[1:], *on_way, *map(id, held)
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = State(free, waiting, held)
        return state

    def send(self, place: int, blocks: Group) -> Group:
        """Put a group of blocks on its way, at the end of a queue."""
        group: Group = self.intern(blocks)
        self.queues[place].append(group)
        return group

    def codes(self, numbers: Integers, backs: Sequence[Backs]) -> Integers:
        """Codes of passes in a row.

        Args:
            numbers: of the passes.
            backs: of each queue, what comes back between them.
        """
        few = len(backs) <= _IN_CODE and all(int(back.new.max(initial=0)) < SEEN for back in backs)
        codes, weight = numbers.copy(), SEEN
        for back in backs if few else ():
            codes += weight * back.new
            weight *= SEEN
        odd: Iterable[int] = {which for back in backs for which in back.odd} if few else range(len(numbers))
        parts = [back.new.tolist() for back in backs] if odd else []
        for which in odd:
            part = [one.odd.get(which, new[which]) for one, new in zip(backs, parts, strict=True)]
            codes[which] = -self._odd_code((int(numbers[which]), *part))
        return codes

    def _odd_code(self, part: _Part) -> int:
        code = self._odd_codes.get(part)
        if code is None:
            self._parts.append(part)
            code = self._odd_codes[part] = len(self._parts)
        return code

    def step(self, state: State, code: int) -> int:
        """Make a transition; gives its number."""
        self.allocator.restore(state.free)
        self.queues, self.held = [deque(queue) for queue in state.queues], state.held
        number, backs = self.decoded(code)
        self.come_back(backs)
        on_way = self.call(number)
        return self.add_row((*self.allocator.used(), *self.sizes(on_way)), self.enter(self.queues, self.held))

    def come_back(self, backs: Sequence[int | tuple[int, ...]]) -> None:
        """What comes back of each queue."""
        self.watch.passed = False
        for place, back in enumerate(backs):
            if not back:
                continue
            queue = self.queues[place]
            there = len(queue)
            # What comes back as soon as it is freed is not on its way yet.
            if isinstance(back, int):
                self.watch.passed |= back > there
                for _ in range(min(back, there)):
                    self.give(queue.popleft())
                continue
            self.watch.passed |= back[-1] >= there
            for one in back:
                if one < there:
                    self.give(queue[one])
            self.queues[place] = deque(group for number, group in enumerate(queue) if number not in back)

    def call(self, number: int) -> Any:
        """Run a pass; gives what it leaves on its way."""
        name, arguments = self.calls[number]
        on_way, self.held = getattr(self, name)(self.held, *arguments)
        self.allocator.collect()
        return on_way

    def add_row(self, row: Sequence[int], target: State) -> int:
        """A transition; gives its number."""
        number = len(self.targets)
        if number == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._rows[number, : len(row)] = row
        self.targets.append(target)
        return number

    def decoded(self, code: int) -> tuple[int, Sequence[int | tuple[int, ...]]]:
        """The number of a pass, and what of each queue comes back before it."""
        if code < 0:
            number, *backs = self._parts[-code - 1]
            assert isinstance(number, int)  # noqa: S101 - it comes first
            return number, backs
        code, number = divmod(code, SEEN)
        parts = []
        for _ in self.queues:
            code, part = divmod(code, SEEN)
            parts.append(part)
        return number, parts

    def sizes(self, on_way: Sequence[Group]) -> tuple[int, ...]:
        """Bytes of what a pass leaves on its way, each way: as allocated, and as asked for."""
        return tuple(sum([spot[what] for spot in group]) for group in on_way for what in (1, 2))

    def give(self, group: Group) -> None:
        """Blocks come back."""
        for address, size, _ in group:
            self.allocator.give(address, size, _STREAM)


def spots(blocks: Iterable[Block]) -> Group:
    """Where blocks are."""
    return tuple((block.address, block.size, block.requested) for block in blocks)
