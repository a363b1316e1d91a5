"""Rows of requests to one pool, and what is remembered of what they did.

A row is cut where nothing is in use that it gives back later. Its parts then have nothing to do with each other but
what the one leaves free for the next, so each of them is remembered for itself: where one of them finds the free
intervals a little different, and chooses otherwise, the others may still do what they did before. A model repeats its
layers, and so a row its parts: those that differ in the names of their blocks only are one.

What blocks were asked for is known beforehand, so of what they got only what is larger is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Final, NamedTuple

from gpipe_bench.simulator.memory.allocator import Allocator
from gpipe_bench.simulator.memory.footprints import Footprint, Footprints
from gpipe_bench.simulator.memory.pools import SHIFT, Larger, Pool, Requests, State
from gpipe_bench.simulator.memory.transients import Demands, keeps_nothing

__all__ = ["Done", "Full", "Row", "cut"]

_SHORTEST: Final = 100
"""Requests of a part; fewer are made as fast as they are looked up."""

_NOTHING: Final[Mapping[int, int]] = {}


class Full(Exception):  # noqa: N818 - a signal between a row and its program
    """The device has no room for a new segment."""


class Done:
    """What a row of requests did to one pool.

    Attributes:
        state: what it left free.
        blocks: those that are still in use, with their intervals.
        larger: takes that got more bytes than they asked for: their numbers, and the bytes too many.
        extra: the bytes too many of those blocks that are still in use.
        grown: whether the pool got new segments.
    """

    __slots__ = ("blocks", "extra", "grown", "larger", "state")

    def __init__(
        self,
        state: State,
        blocks: dict[int, int],
        larger: Larger = (),
        extra: Mapping[int, int] = _NOTHING,
        *,
        grown: bool = False,
    ) -> None:
        self.state, self.blocks, self.larger, self.extra, self.grown = state, blocks, larger, extra, grown


class _Named(NamedTuple):
    """A part of a row.

    Attributes:
        part: the requests.
        names: of the blocks, which the part calls by their numbers; none: it calls them by their names.
        before: how many takes of the row are before it.
    """

    part: _Part
    names: list[int]
    before: int


class Row:
    """Requests to one pool.

    Args:
        requests: in order.
        small: whether they are made to a pool of small blocks.
    """

    __slots__ = ("_known", "_parts")

    def __init__(self, requests: Requests, *, small: bool = False) -> None:
        parts = list(cut(requests))
        self._parts = [_Named(_Part(requests, small=small), [], 0)] if len(parts) < 2 else _named(parts, small=small)
        # By what was found free, and where the blocks were that were in use.
        self._known: dict[object, Done] = {}

    def run(self, allocator: Allocator, pool: Pool, incoming: Done | None) -> Done:
        """Make the requests.

        Args:
            allocator: to get new segments from.
            pool: what the requests are made to.
            incoming: where the blocks are that were in use before, if any were.

        Raises:
            Full: there was no room for a new segment.
        """
        key = pool.save(), incoming
        known = self._known.get(key)
        if known is not None:
            pool.restore(known.state)
            return known
        found = [part.run(allocator, pool, incoming) for part, _, _ in self._parts]
        done = found[0] if len(found) == 1 else self._together(found)
        if not done.grown:
            self._known[key] = done
        return done

    def _together(self, found: Sequence[Done]) -> Done:
        blocks: dict[int, int] = {}
        extra: dict[int, int] = {}
        larger: list[tuple[int, int]] = []
        for done, (_, names, before) in zip(found, self._parts, strict=True):
            if done.blocks:
                blocks.update(zip(map(names.__getitem__, done.blocks), done.blocks.values(), strict=True))
            if done.larger:
                larger += [(before + number, more) for number, more in done.larger]
                extra.update((names[block], more) for block, more in done.extra.items())
        return Done(found[-1].state, blocks, larger, extra, grown=any(done.grown for done in found))


class _Part:
    """Requests that are remembered together.

    Args:
        requests: in order.
        small: whether they are made to a pool of small blocks, which gives nobody more than what is asked for.
    """

    __slots__ = ("_asked", "_demands", "_footprints", "_known", "_placed", "_requests")

    def __init__(self, requests: Requests, *, small: bool) -> None:
        self._requests = requests
        self._asked: tuple[list[int], list[int]] | None = None
        self._demands = Demands(requests) if small and keeps_nothing(requests) else None
        # By what was found free; where blocks were in use before, by them and their intervals too.
        self._known: dict[State, Done] = {}
        self._placed: dict[tuple[State, tuple[int, ...], tuple[int, ...]], Done] = {}
        self._footprints = Footprints()

    def run(self, allocator: Allocator, pool: Pool, incoming: Done | None) -> Done:
        """Make the requests, or do what they are known to do."""
        before = pool.save()
        if incoming is not None:
            return self._after(allocator, pool, incoming)
        known = self._known.get(before)
        if known is None:
            known = self._looked_up(before)
            if known is not None:
                self._known[before] = known
        if known is not None:
            pool.restore(known.state)
            return known
        done = self._replay(allocator, pool, None)
        if not done.grown:
            self._known[before] = done
        return done

    def _looked_up(self, before: State) -> Done | None:
        """What the requests do where they were not made yet, if that is known."""
        if self._demands is not None and self._demands.met(before.free):
            return Done(before, {})
        again = self._footprints.again(before)
        if again is None:
            return None
        state, blocks, larger = again
        return Done(state, blocks, larger, self._extra(larger, blocks))

    def _after(self, allocator: Allocator, pool: Pool, incoming: Done) -> Done:
        """Make requests that may give back what others took."""
        key = pool.save(), tuple(incoming.blocks), tuple(incoming.blocks.values())
        known = self._placed.get(key)
        if known is not None:
            pool.restore(known.state)
            return known
        done = self._replay(allocator, pool, incoming)
        if not done.grown:
            self._placed[key] = done
        return done

    def _replay(self, allocator: Allocator, pool: Pool, incoming: Done | None) -> Done:
        """Make the requests one by one."""
        grown = False

        def grow(size: int) -> tuple[int, int]:
            nonlocal grown
            grown = True
            if not allocator.fits(size):
                raise Full
            return allocator.segment(size)

        before, footprints = pool.save(), self._footprints
        blocks = {} if incoming is None else incoming.blocks.copy()
        shrinking = footprints.shrinking(pool)
        chosen, larger = pool.replay(zip(*self._requests, strict=True), blocks, grow, shrinking)
        extra = self._extra(larger, blocks)
        if incoming is not None:
            extra |= {block: more for block, more in incoming.extra.items() if block in blocks}
        done = Done(pool.save(), blocks, larger, extra, grown=grown)
        if incoming is None and not grown:
            choices = self._takes()[1], chosen
            footprints.add(Footprint(before, done.state, blocks, choices, shrinking), larger)
        return done

    def _takes(self) -> tuple[list[int], list[int]]:
        """The block of each take, and the bytes that it asks for."""
        if self._asked is None:
            takes = [(block, abs(wanted) >> SHIFT) for block, wanted in zip(*self._requests, strict=True) if wanted]
            self._asked = [block for block, _ in takes], [size for _, size in takes]
        return self._asked

    def _extra(self, larger: Larger, blocks: Mapping[int, int]) -> dict[int, int]:
        """Of blocks in use, the bytes that they got too many."""
        found: dict[int, int] = {}
        if larger:
            names, sizes = self._takes()
            for number, more in larger:
                block = names[number]
                if block in blocks and blocks[block] >> SHIFT == sizes[number] + more:
                    found[block] = more
        return found


def _named(parts: Sequence[Requests], *, small: bool) -> list[_Named]:
    """Parts with the names of their blocks; those that are alike are one."""
    known: dict[object, _Part] = {}
    found: list[_Named] = []
    before = 0
    for blocks, wanted in parts:
        numbers = dict(zip(dict.fromkeys(blocks), count()))
        numbered = list(map(numbers.__getitem__, blocks))
        key = tuple(numbered), tuple(wanted)
        if key not in known:
            known[key] = _Part((numbered, wanted), small=small)
        found.append(_Named(known[key], list(numbers), before))
        before += len(wanted) - wanted.count(0)
    return found


def cut(requests: Requests, shortest: int = _SHORTEST) -> Iterator[Requests]:
    """Parts of a row that give back nothing but what they took; the whole row if it gives back other blocks.

    Args:
        requests: of the row.
        shortest: requests of a part, the last one aside.
    """
    blocks, wants = requests
    given = {block for block, wanted in zip(blocks, wants, strict=True) if not wanted}
    if len(blocks) <= shortest or not given.issubset(
        block for block, wanted in zip(blocks, wants, strict=True) if wanted > 0
    ):
        yield requests
        return
    start = open_blocks = 0
    for place, (block, wanted) in enumerate(zip(blocks, wants, strict=True), 1):
        if not wanted:
            open_blocks -= 1
        elif wanted > 0 and block in given:
            open_blocks += 1
        if not open_blocks and place - start >= shortest:
            yield blocks[start:place], wants[start:place]
            start = place
    if start < len(blocks):
        yield blocks[start:], wants[start:]
