"""What comes to a partition on its copy streams, and how long it stays there, where skips begin or end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.simulator.known_order.step_times import Flags, Integers
from gpipe_bench.simulator.memory_states.come_backs import Moments, come_backs
from gpipe_bench.simulator.memory_states.skip_lives import Lives
from gpipe_bench.simulator.memory_states.skip_states import SlotStates
from gpipe_bench.simulator.memory_states.skip_times import Copy, SkipTimes
from gpipe_bench.simulator.virtual_time.places import POOL

__all__ = ["WITH_BACKWARD", "WITH_FORWARD", "Slots"]

_Way = tuple[bool, int]
"""Whether it is of the backward pass, and a sender; -1: the pass itself."""

WITH_FORWARD: _Way = (False, -1)
WITH_BACKWARD: _Way = (True, -1)


class _Arrival(NamedTuple):
    """A kind of copy that comes to the partition: what it brings by size and by whether there is no checkpoint.

    Attributes:
        copy: its times.
        back: whether it brings gradients, and so which way it is.
        kind: among those.
        places: of its tensors among all that come that way.
    """

    copy: Copy
    back: bool
    kind: int
    places: slice


class Slots:
    """The copy streams of one partition.

    Args:
        lives: of what comes to it.
        sizes: of the micro-batches.
        again: (m,) whether each is recomputed.
        times: of all partitions.
        n: partitions.

    Attributes:
        lives: as above.
        times: as above.
        arrivals: kinds of copies that come.
        came: bytes that come with each, as allocated and as asked for, (arrivals, steps, m, 2).
        gone: the same of what goes, by what lets go of it, (steps, m, 2).
        reserved: bytes of segments.
    """

    def __init__(self, lives: Lives, sizes: Sequence[int], again: Flags, times: SkipTimes, n: int) -> None:
        self.lives, self._sizes, self._again, self.times, self._m = lives, sizes, again, times, len(sizes)
        self.arrivals = self._arrivals(n)
        kinds = sum(one.back for one in self.arrivals)
        where = [self._where(one) for one in self.arrivals]
        ways = {way for of in where for ways in of for way in ways} - {WITH_BACKWARD}
        self._ways = [WITH_BACKWARD, *sorted(ways)]
        self._states = SlotStates(len(self._ways), kinds)
        self._numbers = np.stack([times.numbers(one.copy) for one in self.arrivals])
        turns = [times.turns(one.copy) for one in self.arrivals]
        self._turns = Moments(*(np.stack([getattr(one, name) for one in turns]) for name in Moments._fields))
        self._passes = self._pass_numbers(where)
        self._leaving = [self._left(way, where) for way in self._ways]
        shape = len(self.arrivals), times.count, self._m
        rows = np.zeros((*shape, 4 + 2 * len(self._ways)), dtype=np.int64)
        self.reserved = sum(self._run(slot, rows) for slot in range(min(POOL, self._m)))
        self.came: NDArray[np.int64] = rows[..., [0, 2]]
        self.gone: dict[_Way, NDArray[np.int64]] = {
            way: rows[..., 4 + 2 * place : 6 + 2 * place].sum(axis=0) for place, way in enumerate(self._ways)
        }

    def _arrivals(self, n: int) -> list[_Arrival]:
        lives, j, found = self.lives, self.lives.j, list[_Arrival]()
        work = lives.work
        inputs, outputs = len(work.input_bytes), len(work.output_bytes)
        if j:
            # In the order in which they come.
            portals = [Copy(f"portal {skip.key}", j) for skip in lives.ending]
            found += [
                _Arrival(copy, False, -1, slice(inputs + place, inputs + place + 1))
                for place, copy in enumerate(portals)
            ]
            found.append(_Arrival(Copy("copy", j), False, -1, slice(inputs)))
        if j < n - 1:
            found.append(_Arrival(Copy("copy_grad", j + 1), True, 0, slice(outputs)))
            found += [
                _Arrival(Copy(f"portal_grad {skip.key}", skip.target), True, 1 + place, slice(end, end + 1))
                for place, (end, skip) in enumerate(enumerate(lives.departing, outputs))
            ]
        else:
            # Nothing comes, but what is there goes.
            found.append(_Arrival(Copy("backward", j), True, 0, slice(0)))
        return found

    def _where(self, one: _Arrival) -> list[list[_Way]]:
        """For each micro-batch, what lets go of each tensor that a copy brings."""
        known: dict[tuple[int, bool], list[_Way]] = {}
        for key in zip(self._sizes, self._again.tolist(), strict=True):
            if key not in known:
                size, again = key
                senders = self.lives.gradients(size) if one.back else self.lives.inputs(size, is_open=not again)
                known[key] = [WITH_BACKWARD if sender is None else (one.back, sender) for sender in senders[one.places]]
        return [known[key] for key in zip(self._sizes, self._again.tolist(), strict=True)]

    def _pass_numbers(self, where: Sequence[Sequence[Sequence[_Way]]]) -> Integers:
        """The number of each pass of the automaton, (arrivals, steps, m)."""
        found = np.zeros_like(self._numbers)
        gradients = [place for place, one in enumerate(self.arrivals) if one.back]
        last = self._numbers[gradients].max(axis=0)
        for place, one in enumerate(self.arrivals):
            bytes_of = self.lives.leaving_bytes if one.back else self.lives.arriving_bytes
            numbers = []
            for i, size in enumerate(self._sizes):
                queues = tuple(map(self._ways.index, where[place][i]))
                brought = bytes_of(size)[one.places], queues
                if one.back:
                    numbers.append(
                        [self._states.number("bring_back", one.kind, *brought, end) for end in (False, True)]
                    )
                else:
                    numbers.append([self._states.number("bring", *brought, one.copy.kind == "copy")] * 2)
            found[place] = np.where(self._numbers[place] == last, *np.array(numbers).T[::-1])
        return found

    def _left(self, way: _Way, where: Sequence[Sequence[Sequence[_Way]]]) -> tuple[Integers, Moments, Integers]:
        """What is on its way with ``way``: the number of what lets it go, when it is back, and groups of each task."""
        back, sender = way
        lives, times, j = self.lives, self.times, self.lives.j
        groups = np.array([sum(way in of[i] for of in where) for i in range(self._m)])
        if way == WITH_BACKWARD:
            return times.numbers(Copy("backward", j)), times.used(j), np.ones_like(groups)
        own = Copy("backward" if back else "forward", j)
        if sender < 0:
            return times.numbers(own), times.ends(own), groups
        copy = lives.senders(back=back)[sender]
        ended = times.ends(own)
        if not back:
            # The last forward pass that was issued before it.
            last = np.minimum(np.arange(self._m) + copy.at - 1 - j, self._m - 1)
            ended = Moments(ended.times[:, last], ended.entries[:, last])
        return times.numbers(copy), ended, groups

    def _run(self, slot: int, rows: NDArray[np.int64]) -> int:
        """Run one stream; fills its rows, and gives what it reserves."""
        own = np.arange(slot, self._m, POOL)
        numbers = self._numbers[:, :, own].reshape(-1)
        order = np.argsort(numbers)
        turns = Moments(*(times[:, :, own].reshape(-1)[order] for times in self._turns))
        backs = []
        for (back, _), (sender, ended, groups) in zip(self._ways, self._leaving, strict=True):
            which = own[::-1] if back else own
            times = np.tile(groups[which], self.times.count)
            edges = (np.repeat(part[:, which].reshape(-1), times) for part in (*ended, sender))
            ends, entries, senders = edges
            least = np.searchsorted(numbers[order], senders, "right")
            backs.append(come_backs(Moments(ends, entries), turns, least))
        found, reserved = self._states.run(self._states.codes(self._passes[:, :, own].reshape(-1)[order], backs))
        part = np.zeros_like(found)
        part[order] = found
        rows[:, :, own] = part.reshape(len(self.arrivals), self.times.count, len(own), -1)
        return reserved
