"""Rows of requests to one pool, and what is remembered of what they did.

A row is cut where nothing is in use that it gives back later. Its parts then have nothing to do with each other but
what the one leaves free for the next, so each of them is remembered for itself: where one of them finds the free
intervals a little different, and chooses otherwise, the others may still do what they did before. A model repeats its
layers, and so a row its parts: those that differ in the names of their blocks only are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from gpipe_bench.simulator.allocator import Allocator
from gpipe_bench.simulator.footprints import Footprint, Footprints
from gpipe_bench.simulator.pools import SHIFT, Pool, Request, State
from gpipe_bench.simulator.transients import Demands, keeps_nothing

__all__ = ["Done", "Full", "Row", "cut"]

_SHORTEST: Final = 100
"""Requests of a part; fewer are made as fast as they are looked up."""


class Full(Exception):  # noqa: N818 - a signal between a row and its program
    """The device has no room for a new segment."""


class Done:
    """What a row of requests did to one pool.

    Attributes:
        state: what it left free.
        blocks: those that are still in use, with their intervals.
        changes: of the bytes in use, by each take and give; of a row, equal ones are one object.
        grown: whether the pool got new segments.
    """

    __slots__ = ("blocks", "changes", "grown", "state")

    def __init__(self, state: State, blocks: dict[int, int], changes: tuple[int, ...], *, grown: bool = False) -> None:
        self.state, self.blocks, self.changes, self.grown = state, blocks, changes, grown


class Row:
    """Requests to one pool.

    Args:
        requests: in order.
        small: whether they are made to a pool of small blocks.
    """

    __slots__ = ("_changes", "_known", "_parts")

    def __init__(self, requests: Sequence[Request], *, small: bool = False) -> None:
        # With the names of its blocks, which the part calls by their numbers; none: by their names.
        self._parts: list[tuple[_Part, list[int]]] = []
        parts = cut(requests)
        known: dict[tuple[Request, ...], _Part] = {}
        for part in parts if len(parts) > 1 else ():
            names = list(dict.fromkeys(block for block, _ in part))
            numbers = {name: number for number, name in enumerate(names)}
            numbered = tuple((numbers[block], wanted) for block, wanted in part)
            self._parts.append((known.setdefault(numbered, _Part(numbered, small=small)), names))
        if not self._parts:
            self._parts.append((_Part(requests, small=small), []))
        # By what was found free, and where the blocks were that were in use.
        self._known: dict[object, Done] = {}
        # By the ids of those of the parts, which keep them.
        self._changes: dict[tuple[int, ...], tuple[int, ...]] = {}

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
        found = [part.run(allocator, pool, incoming) for part, _ in self._parts]
        done = found[0] if len(found) == 1 else self._together(found)
        if not done.grown:
            self._known[key] = done
        return done

    def _together(self, found: Sequence[Done]) -> Done:
        blocks: dict[int, int] = {}
        for done, (_, names) in zip(found, self._parts, strict=True):
            blocks.update(zip(map(names.__getitem__, done.blocks), done.blocks.values(), strict=True))
        key = tuple(id(done.changes) for done in found)
        if key not in self._changes:
            self._changes[key] = tuple(chain.from_iterable(done.changes for done in found))
        return Done(found[-1].state, blocks, self._changes[key], grown=any(done.grown for done in found))


class _Part:
    """Requests that are remembered together.

    Args:
        requests: in order.
        small: whether they are made to a pool of small blocks, which gives nobody more than what is asked for.
    """

    __slots__ = ("_blocks", "_changes", "_demands", "_footprints", "_known", "_placed", "_takes", "_wanted")

    def __init__(self, requests: Sequence[Request], *, small: bool) -> None:
        # In columns, which are read faster than as many pairs.
        self._blocks = [block for block, _ in requests]
        self._wanted = [wanted for _, wanted in requests]
        self._takes = _Takes(requests)
        self._demands = Demands(requests) if small and keeps_nothing(requests) else None
        # By what was found free; where blocks were in use before, by them and their intervals too.
        self._known: dict[State, Done] = {}
        self._placed: dict[tuple[State, tuple[int, ...], tuple[int, ...]], Done] = {}
        self._footprints = Footprints()
        self._changes: dict[tuple[int, ...], tuple[int, ...]] = {}

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
            return Done(before, {}, self._takes.changes)
        again = self._footprints.again(before)
        return None if again is None else Done(*again)

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
        arriving = incoming.blocks if incoming is not None else {}
        blocks = arriving.copy()
        shrinking = footprints.shrinking(pool)
        requests = zip(self._blocks, self._wanted, strict=True)
        chosen, larger = pool.replay(requests, blocks, grow, shrinking)
        changes = self._takes.changed(larger, arriving)
        changes = self._changes.setdefault(changes, changes)
        done = Done(pool.save(), blocks, changes, grown=grown)
        if incoming is None and not grown:
            choices = set(zip(self._takes.sizes, chosen, strict=True))
            footprints.add(Footprint(before, done.state, blocks, choices, shrinking), changes)
        return done


class _Takes:
    """By how much a part changes the bytes in use, request by request.

    Args:
        requests: of the part.

    Attributes:
        sizes: bytes asked for by each take.
        changes: by each take and give, if every block has the size that was asked for.
    """

    __slots__ = ("_arriving", "_places", "changes", "sizes")

    def __init__(self, requests: Sequence[Request]) -> None:
        self.sizes = [abs(wanted) >> SHIFT for _, wanted in requests if wanted]
        changes: list[int] = []
        # Of each take the places of its changes; of what others took, where it is given back.
        self._places: list[list[int]] = []
        self._arriving: list[tuple[int, int]] = []
        numbers: dict[int, int] = {}
        for block, wanted in requests:
            place = len(changes)
            if wanted:
                size = abs(wanted) >> SHIFT
                self._places.append([place])
                changes.append(size)
                if wanted > 0:
                    numbers[block] = len(self._places) - 1
                else:
                    self._places[-1].append(place + 1)
                    changes.append(-size)
            elif block in numbers:
                number = numbers.pop(block)
                self._places[number].append(place)
                changes.append(-self.sizes[number])
            else:
                self._arriving.append((place, block))
                changes.append(0)
        self.changes = tuple(changes)

    def changed(self, larger: Sequence[tuple[int, int]], arriving: Mapping[int, int]) -> tuple[int, ...]:
        """The changes, where some takes got more than they asked for.

        Args:
            larger: numbers of these takes, and the bytes too many.
            arriving: blocks of others, with their intervals.
        """
        if not larger and not self._arriving:
            return self.changes
        changes = list(self.changes)
        for place, block in self._arriving:
            changes[place] = -(arriving[block] >> SHIFT)
        for number, more in larger:
            taken, *given = self._places[number]
            changes[taken] += more
            for place in given:
                changes[place] -= more
        return tuple(changes)


def cut(requests: Sequence[Request], shortest: int = _SHORTEST) -> list[Sequence[Request]]:
    """Parts of a row that give back nothing but what they took; the whole row if it gives back other blocks.

    Args:
        requests: of the row.
        shortest: requests of a part, the last one aside.
    """
    given = {block for block, wanted in requests if not wanted}
    if not given.issubset(block for block, wanted in requests if wanted > 0):
        return [requests]
    parts: list[Sequence[Request]] = []
    start = open_blocks = 0
    for place, (block, wanted) in enumerate(requests, 1):
        if not wanted:
            open_blocks -= 1
        elif wanted > 0 and block in given:
            open_blocks += 1
        if not open_blocks and place - start >= shortest:
            parts.append(requests[start:place])
            start = place
    if start < len(requests) or not parts:
        parts.append(requests[start:])
    return parts
