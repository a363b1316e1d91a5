"""Blocks of memory while layers are put together, each with who holds it, and what kernels cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpipe_bench.kernels.cost import duration_ns, scratch_bytes
from gpipe_bench.kernels.kernel import NO_BLOCK, Alloc, Free, Kernel, LayerTrace, SplitTrace, Step
from gpipe_bench.machine.profile import Profile
from gpipe_bench.simulator.workloads.workload import NOTHING, Kernels, MemoryOp, in_turn


@dataclass(slots=True)
class Blocks:
    """Blocks of a task with their holders; what came from outside is negative, and never allocated here.

    Attributes:
        costs: of the layers.
        ops: the requests so far.
        holders: of each block.
        count: blocks so far.
    """

    costs: Costs
    ops: list[MemoryOp] = field(default_factory=list)
    holders: Counter[int] = field(default_factory=Counter)
    count: int = 0

    def leave(self, blocks: Iterable[int]) -> None:
        """The task holds these blocks no more."""
        self.holders.subtract(blocks)

    def alloc(self, nbytes: int) -> int:
        """A new block, held once."""
        block = self.count
        self.count += 1
        self.ops.append(MemoryOp("alloc", block, nbytes))
        self.holders[block] += 1
        return block

    def hold(self, block: int) -> None:
        """One more holder of a block."""
        self.holders[block] += 1

    def drop(self, block: int, kind: Literal["free", "gradient", "view"] = "free") -> None:
        """One holder of a block less; without any it is free."""
        self.holders[block] -= 1
        if not self.holders[block] and block != NO_BLOCK:
            self.ops.append(MemoryOp(kind if block >= 0 else "free", block))

    def sums_onto(self, first: int) -> bool:
        """Whether autograd adds a second gradient to the first one in place: it does if nobody else holds the first."""
        return first > NO_BLOCK and self.holders[first] == 1 and self.costs.sums_in_place

    def run(self, steps: Sequence[Step], names: dict[int, int]) -> None:
        """The steps of a layer, whose blocks are called ``names`` in the partition."""
        for step in steps:
            if isinstance(step, Alloc):
                if self.sums_onto(names.get(step.onto, NO_BLOCK)):
                    names[step.block] = names.pop(step.onto)
                else:
                    names[step.block] = self.alloc(step.bytes)
            elif isinstance(step, Free):
                if step.block in names:
                    kind: Literal["gradient", "view"] = "view" if step.view else "gradient"
                    self.drop(names.pop(step.block), kind if step.gradient else "free")
            else:
                scratch = self.costs.scratch(step)
                if scratch is not None:
                    self.ops.append(scratch)

    def take(self) -> tuple[MemoryOp, ...]:
        """The requests since the last call."""
        ops, self.ops = tuple(self.ops), []
        return ops


class Costs:
    """What layers cost on one device, by its profile; layers of one kind share their durations.

    Args:
        profile: the device.
        sums_in_place: whether autograd adds gradients up in place where it may, as today's does.
    """

    def __init__(self, profile: Profile, *, sums_in_place: bool = True) -> None:
        self.profile, self.sums_in_place = profile, sums_in_place
        # The layers are kept: an id may only be used again when its object is gone.
        self._known: dict[tuple[int, str], tuple[Kernels, LayerTrace | SplitTrace]] = {}
        # Kernels with scratch memory, numbered.
        self._scratches: dict[Kernel, MemoryOp | None] = {}

    def scratch(self, kernel: Kernel) -> MemoryOp | None:
        """The scratch memory that a kernel asks for, if any."""
        # What it does besides does not tell kinds of kernels apart.
        bare = kernel._replace(parts=None)
        if bare not in self._scratches:
            nbytes = scratch_bytes(kernel, self.profile)
            number = len(self._scratches)
            self._scratches[bare] = MemoryOp("scratch", number, nbytes) if nbytes else None
        return self._scratches[bare]

    def of(self, layer: LayerTrace | SplitTrace, direction: str) -> Kernels:
        """One pass of a layer: ``forward``, ``plain`` or ``backward``; of a split one ``inputs`` or ``weights``."""
        key = id(layer), direction
        if key not in self._known:
            self._known[key] = total(layer.kernels(direction), self.profile), layer
        return self._known[key][0]

    def sums(self, sizes: Iterable[int]) -> Kernels:
        """Sums of two gradients of these bytes."""
        return total(map(Kernel.sum, sizes), self.profile)

    def total_of(
        self, layers: Sequence[LayerTrace] | Sequence[SplitTrace], direction: str, more: Kernels = NOTHING
    ) -> Kernels:
        """One pass of layers in this order, after ``more``."""
        return in_turn((more, *(self.of(layer, direction) for layer in layers)))


def total(kernels: Iterable[Kernel], profile: Profile) -> Kernels:
    """What kernels cost that run one after the other."""
    duration = launches = adding_ns = adding_launches = 0
    ends: list[int] = []
    for kernel in kernels:
        own = duration_ns(kernel, profile)
        ends += (duration + own * (k + 1) // kernel.launches for k in range(kernel.launches))
        duration += own
        launches += kernel.launches
        if kernel.adds:
            adding_ns += own
            adding_launches += kernel.launches
    return Kernels(duration, launches, adding_ns, adding_launches, ends_ns=tuple(ends))
