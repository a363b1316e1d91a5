"""Who is the last one to hold what a partition gives out, where skips begin or end at it.

A tensor may leave as output and as skip, or be passed on as it came. It goes with whatever sends it on last:

    forward     portals in the order of the partitions that they go to, before the copy to that partition
    backward    the copy, then the skips that came, the last one first
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpipe_bench.simulator.memory.ways import kept_names
from gpipe_bench.simulator.memory_states.skip_times import Copy
from gpipe_bench.simulator.tracing.steps import NO_BLOCK
from gpipe_bench.simulator.workloads.workload import TaskWork, Workload, gradient_name, input_name

__all__ = ["Lives", "touched"]


def touched(workload: Workload) -> frozenset[int]:
    """Partitions that skips begin or end at."""
    return frozenset(end for one in workload.skips if one.source != one.target for end in (one.source, one.target))


class Lives:
    """How long tensors live that cross the edges of a partition.

    Senders are numbered: the copy is 0, then come the skips.

    Args:
        workload: of all partitions.
        j: the partition.

    Attributes:
        j: the partition.
        departing: skips that begin there.
        ending: skips that end there.
        work: a task of the partition; the others have as many tensors.
    """

    def __init__(self, workload: Workload, j: int) -> None:
        self.j, self._first, self._last = j, j == 0, j == workload.n - 1
        self._works = workload.partitions[j]
        self.work = next(iter(self._works.values()))
        self.departing = [skip for skip in workload.skips if skip.source == j != skip.target]
        self.ending = [skip for skip in workload.skips if skip.target == j != skip.source]

    def senders(self, *, back: bool) -> list[Copy]:
        """What sends on what a task gives out, the copy first; nothing but it where there is none to send to."""
        if back:
            kinds = [Copy(f"portal_grad {skip.key}", self.j) for skip in self.ending]
            return [] if self._first else [Copy("copy_grad", self.j), *kinds]
        kinds = [Copy(f"portal {skip.key}", skip.target) for skip in self.departing]
        return [] if self._last else [Copy("copy", self.j + 1), *kinds]

    def known(self) -> bool:
        """Whether tensors live as this file says."""
        return all(self._is_covered(work) for work in self._works.values())

    def _is_covered(self, work: TaskWork) -> bool:
        inputs = {input_name(place) for place in range(len(work.input_bytes) + len(self.ending))}
        gradients = {gradient_name(place) for place in range(len(work.output_bytes) + len(self.departing))}
        named = [name for name in work.leaving if name != NO_BLOCK]
        if self._last and len({*named}) < len(named):
            return False
        passed, returned = ({name for name in of if name < NO_BLOCK} for of in (work.leaving, work.returning))
        # The first and the last partition pass nothing on.
        return passed <= (set() if self._first or self._last else inputs) and returned <= (
            set() if self._first or self._last else gradients
        )

    def leaving_bytes(self, size: int) -> tuple[int, ...]:
        """Bytes of the tensors that leave a task."""
        return self._works[size].output_bytes + tuple(skip.bytes[size] for skip in self.departing)

    def arriving_bytes(self, size: int) -> tuple[int, ...]:
        """Bytes of the tensors that come into a task."""
        return self._works[size].input_bytes + tuple(skip.bytes[size] for skip in self.ending)

    def last_sender(self, places: Iterable[int], *, back: bool) -> int:
        """Of places of tensors among what is given out the one that is sent last: its sender."""
        copied = len(self.work.input_bytes if back else self.work.output_bytes)
        senders = {max(place - copied + 1, 0) for place in places}
        if back:
            return 0 if senders == {0} else min(senders - {0})
        return max(senders, key=self._turn)

    def _turn(self, sender: int) -> tuple[int, int]:
        """The cycle of a copy or portal, and its place there."""
        if not sender:
            return self.j + 1, len(self.departing)
        return self.departing[sender - 1].target, sender

    def inputs(self, size: int, *, is_open: bool) -> list[int | None]:
        """Of each tensor that comes into a task who sends it on last, if that is all it waits for.

        -1: nobody does, it goes with the forward pass; None: it goes with the backward pass.
        """
        work = self._works[size]
        count = len(work.input_bytes) + len(self.ending)
        if not is_open:
            return [None] * count
        kept = kept_names(work)
        return [None if input_name(at) in kept else self._sender(input_name(at), work.leaving) for at in range(count)]

    def gradients(self, size: int) -> list[int | None]:
        """Of each gradient that comes to a task who sends it on last; None: it goes with the backward pass."""
        work = self._works[size]
        count = len(work.output_bytes) + len(self.departing)
        found = [self._sender(gradient_name(at), work.returning, back=True) for at in range(count)]
        return [None if sender < 0 else sender for sender in found]

    def _sender(self, name: int, names: Sequence[int], *, back: bool = False) -> int:
        places = [place for place, other in enumerate(names) if other == name]
        return self.last_sender(places, back=back) if places else -1
