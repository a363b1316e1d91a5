"""The memory of a copy stream of a partition as an automaton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpipe_bench.simulator.memory_states.pool_states import Automaton, Group, spots

__all__ = ["CopyStates"]


class CopyStates(Automaton):
    """A copy stream of a partition: what comes from the partition before, and from the next one."""

    def __init__(self) -> None:
        super().__init__(1)
        self.start = self.enter(((),), (None,))

    def arrive(
        self, held: tuple[Any], sizes: Sequence[int], gone: Sequence[int], sent: Sequence[int]
    ) -> tuple[list[Group], tuple[Any]]:
        """Inputs come, and are kept until their task's backward pass has run.

        Those at the places ``gone`` are on their way as soon as its forward pass has run, those at ``sent`` when they
        have been passed on as well; nothing else comes here in between. Gives the latter, or else the former.
        """
        made = spots([self.new(nbytes) for nbytes in sizes])
        going: Group = ()
        for places in (gone, sent):
            if places:
                going = self.intern(tuple(made[place] for place in places))
                self.queues[0].append(going)
        kept = tuple(spot for place, spot in enumerate(made) if place not in gone and place not in sent)
        return [going], (self.push(kept, held[0]),)

    def leave(self, held: tuple[Any], sizes: Sequence[int]) -> tuple[list[Group], tuple[Any]]:
        """Gradients come; with the backward pass that follows they go, and so do its inputs if any are kept."""
        group = spots([self.new(nbytes) for nbytes in sizes])
        if held[0] is not None:
            group, held = group + held[0][0], (held[0][1],)
        self.queues[0].append(self.intern(group))
        return [], held
