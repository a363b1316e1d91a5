"""The memory of a partition that skips begin or end at, as automata: its compute stream, and each of its copy streams.

Like those of :mod:`gpipe_bench.simulator.memory_states.home_states`, with more that is on its way: a tensor that
several copies send on goes with the last of them.

    compute stream    outputs   gradients   what graphs hold │ stashed skips, each   gradients of popped skips, each
    copy stream       inputs and gradients until a backward pass │ what goes earlier, by what sends it on last
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gpipe_bench.simulator.memory_states.home_states import LEFT, RETURNED, SHARED, HomeStates
from gpipe_bench.simulator.memory_states.pool_states import Automaton, Group, spots
from gpipe_bench.simulator.memory_states.skip_lives import Lives
from gpipe_bench.simulator.memory_states.straight import Spots
from gpipe_bench.simulator.workloads.workload import Workload

__all__ = ["SkipHomeStates", "SlotStates"]


class SkipHomeStates(HomeStates):
    """The compute stream of a partition that skips begin or end at.

    Args:
        workload: of all partitions.
        lives: of what is given out of it.
        checkpoints: as there.
    """

    def __init__(self, workload: Workload, lives: Lives, *, checkpoints: bool) -> None:
        self._lives = lives
        senders = 1 + len(lives.departing), 1 + len(lives.ending)
        # The queue of each sender, outputs and gradients first.
        self._queues = (
            [LEFT, *range(SHARED + 1, SHARED + senders[0])],
            [RETURNED, *range(SHARED + senders[0], SHARED + sum(senders) - 1)],
        )
        queues, ways = SHARED + sum(senders) - 1, max(senders)
        super().__init__(workload, lives.j, checkpoints=checkpoints, queues=queues, ways=ways)

    def leaving_bytes(self, size: int) -> tuple[int, ...]:
        """With the skips that depart."""
        return self._lives.leaving_bytes(size)

    def returning_bytes(self, size: int) -> tuple[int, ...]:
        """With the skips that arrive."""
        return self._lives.arriving_bytes(size)

    def groups(self, where: Spots, *, back: bool) -> list[tuple[int, Group]]:
        """What is given out, by what sends it last."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in self._queues[back]]
        places: dict[tuple[int, int, int], list[int]] = {}
        for place, spot in where.items():
            places.setdefault(spot, []).append(place)
        for spot, of in places.items():
            found[self._lives.last_sender(of, back=back)].append(spot)
        return [(queue, tuple(group)) for queue, group in zip(self._queues[back], found, strict=True)]


class _Held(NamedTuple):
    """What copies have brought.

    Attributes:
        coming: of a micro-batch of which more comes, what its task keeps.
        stack: of those whose backward pass is to come: (what their tasks keep, the others), the last one first.
        waiting: gradients that have come for tasks of which others are missing, first come first, of each kind.
    """

    coming: Group = ()
    stack: tuple[Group, Any] | None = None
    waiting: tuple[tuple[Group, ...], ...] = ()


class SlotStates(Automaton):
    """A copy stream of a partition: what comes from other partitions.

    Args:
        queues: of what is on its way; the first is that of what goes with backward passes.
        kinds: of gradients that come.
    """

    def __init__(self, queues: int, kinds: int) -> None:
        super().__init__(queues, ways=queues)
        self.start = self._entered(_Held(waiting=((),) * kinds))

    def bring(self, held: _Held, sizes: Sequence[int], where: Sequence[int], last: bool) -> tuple[list[Group], _Held]:
        """Inputs come; ``where``: the queue of each, ``last``: whether nothing more comes for the task."""
        groups = self._made(sizes, where)
        held = held._replace(coming=held.coming + groups[0])
        if last:
            held = _Held((), self.push(held.coming, held.stack), held.waiting)
        return groups, self._same_held(held)

    def bring_back(
        self, held: _Held, kind: int, sizes: Sequence[int], where: Sequence[int], last: bool
    ) -> tuple[list[Group], _Held]:
        """Gradients come; with the last ones all that goes with the backward pass is on its way."""
        groups = self._made(sizes, where)
        waiting = list(held.waiting)
        waiting[kind] += (groups[0],)
        if last:
            gone: Group = sum((of[0] for of in waiting), ())
            waiting = [of[1:] for of in waiting]
            if held.stack is not None:
                gone, held = gone + held.stack[0], held._replace(stack=held.stack[1])
            self.queues[0].append(self.intern(gone))
        return groups, self._same_held(held._replace(waiting=tuple(waiting)))

    def _made(self, sizes: Sequence[int], where: Sequence[int]) -> list[Group]:
        made = spots([self.new(nbytes) for nbytes in sizes])
        groups = [
            self.intern(tuple(spot for spot, place in zip(made, where, strict=True) if place == queue))
            for queue in range(len(self.queues))
        ]
        for queue in {*where} - {0}:
            self.queues[queue].append(groups[queue])
        return groups

    def _same_held(self, held: _Held) -> _Held:
        return _Held(self.intern(held.coming), held.stack, self.intern(held.waiting))

    def _entered(self, held: _Held) -> Any:
        return self.enter(self.queues, self._same_held(held))
