"""What is free in a pool as states that know what came of them: what was given back, and what passes did.

Where much is on its way no two states of a device are alike, but those of its free memory are. Then most of what
happens to one pool has happened to it before, from the same free intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpipe_bench.simulator.memory.pools import SHIFT, Pool, Request, State

__all__ = ["Changes", "FreePool", "Made"]

Changes = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
"""What takes, by number, got too many bytes, and what blocks that were in use before had."""


class Made(NamedTuple):
    """What requests left.

    Attributes:
        free: what is free.
        blocks: those in use by name, as intervals; not to be changed.
        changes: number of what is more than was asked for, see :meth:`FreePool.changes`.
        before: blocks that were in use before, kept so that no others are taken for them.
        extra: of blocks in use, the bytes that they got too many.
    """

    free: _Free
    blocks: dict[int, int]
    changes: int
    before: dict[int, int]
    extra: dict[int, int]


class _Free:
    """Free intervals.

    Attributes:
        intervals: which, in order.
        given: what is free when a block, as an interval, has come back.
        made: what requests left, by the ids of these and of the blocks in use before.
    """

    __slots__ = ("_saved", "given", "intervals", "made")

    def __init__(self, intervals: tuple[int, ...]) -> None:
        self.intervals = intervals
        self._saved: State | None = None
        self.given: dict[int, _Free] = {}
        self.made: dict[tuple[int, int], Made] = {}

    def saved(self) -> State:
        """The same for a pool to go back to."""
        if self._saved is None:
            self._saved = State(self.intervals)
        return self._saved


class FreePool:
    """A pool that remembers.

    Args:
        pool: what is free, and where requests are made that are not known.
        grow: size -> a new segment.
    """

    def __init__(self, pool: Pool, grow: Callable[[int], tuple[int, int]]) -> None:
        self._pool, self._grow = pool, grow
        self._known: dict[tuple[int, ...], _Free] = {}
        self._numbers: dict[Changes, int] = {}
        self._changes: list[Changes] = []
        self._grown = False
        self.enter()

    def enter(self) -> None:
        """Go on from what is free in the pool."""
        self._now = self._there = self._of(self._pool.intervals())

    def leave(self) -> None:
        """Make that free in the pool which is free now."""
        self._go()

    def give(self, address: int, size: int) -> None:
        """Take a block back."""
        interval = size << SHIFT | address
        free = self._now.given.get(interval)
        if free is None:
            self._go()
            self._pool.give(address, size)
            free = self._now.given[interval] = self._there = self._of(self._pool.intervals())
        self._now = free

    def make(self, requests: Sequence[Request], before: dict[int, int], extra: Mapping[int, int]) -> Made:
        """Make requests.

        Args:
            requests: of which the caller keeps the one list.
            before: blocks in use.
            extra: of these, the bytes that they got too many.
        """
        now = self._now
        key = id(requests), id(before)
        made = now.made.get(key)
        if made is None:
            made = self._make(requests, before, extra)
            if not self._grown:
                now.made[key] = made
        self._now = made.free
        return made

    def changes(self, number: int) -> Changes:
        """What is more than was asked for."""
        return self._changes[number]

    def forget(self) -> None:
        """Let go of all that is known, each of which leads to the next, so that nobody need search it for circles."""
        for free in self._known.values():
            free.given.clear()
            free.made.clear()
        self._known.clear()

    def _make(self, requests: Sequence[Request], before: dict[int, int], extra: Mapping[int, int]) -> Made:
        pool, blocks = self._pool, before.copy()
        self._go()
        self._grown = False
        _, larger = pool.replay(requests, blocks, self._more)
        changes = tuple(larger), tuple(extra.items())
        number = self._numbers.get(changes)
        if number is None:
            number = self._numbers[changes] = len(self._changes)
            self._changes.append(changes)
        self._there = self._of(pool.intervals())
        left = {name: more for name, more in extra.items() if name in blocks}
        if larger:
            takes = [name for name, wanted in requests if wanted]
            left |= {takes[number]: more for number, more in larger if takes[number] in blocks}
        return Made(self._there, blocks, number, before, left)

    def _go(self) -> None:
        """Bring the pool to where it is now; after what was not known either it is there."""
        if self._there is not self._now:
            self._pool.restore(self._now.saved())

    def _more(self, size: int) -> tuple[int, int]:
        self._grown = True
        return self._grow(size)

    def _of(self, intervals: tuple[int, ...]) -> _Free:
        free = self._known.get(intervals)
        if free is None:
            free = self._known[intervals] = _Free(intervals)
        return free
