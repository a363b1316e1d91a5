"""What a pipeline has to do, in nanoseconds and bytes: the input of the event simulation.

Order comes from the forward program and the autograd model, the time of copies from the machine.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Final, Literal, NamedTuple

from gpipe_bench.schedules.messages import holder

HOST: Final = -1
"""Host memory, as source or target of a copy."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """One direction of one task on one device.

    Attributes:
        duration_ns: total device time when the kernels run back to back.
        launches: number of kernels; each costs the host the machine's ``launch_ns``.
        adding_ns: of that time, what adds gradients of parameters to earlier ones. The first backward pass of a step
            has nothing to add to, unless gradients are set to zero instead of given up.
        adding_launches: launches of these. Each costs the host its time even where there is nothing to add to.
        host_ns: of an update: what the host spends on its parameters, while the device has nothing to do.
        ends_ns: when each launch has run, in that time, and leaves room in the launch queue. Empty: evenly.
    """

    duration_ns: int
    launches: int = 1
    adding_ns: int = 0
    adding_launches: int = 0
    host_ns: int = 0
    ends_ns: tuple[int, ...] = ()


NOTHING: Final = Kernels(0, 0)


def in_turn(works: Iterable[Kernels]) -> Kernels:
    """One after the other."""
    listed = [*works]
    begins = accumulate((work.duration_ns for work in listed), initial=0)
    ends = tuple(begin + end for begin, work in zip(begins, listed, strict=False) for end in work.ends_ns)
    names = (one.name for one in fields(Kernels) if one.name != "ends_ns")
    return Kernels(**{name: sum(getattr(work, name) for work in listed) for name in names}, ends_ns=ends)


class MemoryOp(NamedTuple):
    """One request to the allocator, in the order of the host's calls.

    Attributes:
        kind: ``alloc`` or ``free``; ``scratch``: one kernel asks for memory and gives it back, and can do without;
            ``gradient``: a free, unless its parameter has no gradient yet, which the block then becomes; ``view``: the
            same for a gradient that is a view.
        block: number within its task, :func:`input_name` or :func:`gradient_name`; for ``scratch`` the kind of kernel.
        bytes: requested size; 0 for frees.
    """

    kind: Literal["alloc", "free", "scratch", "gradient", "view"]
    block: int
    bytes: int = 0


def input_name(place: int) -> int:
    """What a task calls one of its inputs: those of the micro-batch, then the skips that arrive."""
    return -2 - 2 * place


def gradient_name(place: int) -> int:
    """What a task calls the gradient of one of its outputs: those of the micro-batch, then the skips that depart."""
    return -3 - 2 * place


@dataclass(frozen=True, slots=True)
class SplitWork:
    """The backward pass of a task in two parts: I gives the gradients of its inputs, W those of its weights.

    Blocks are numbered as in :attr:`TaskWork.graph_memory`.

    Attributes:
        inputs: I; without launches there is nothing to compute.
        weights: W; likewise.
        inputs_memory: requests of I.
        weights_memory: requests of W.
        returning: as :attr:`TaskWork.returning`, after I; W also holds those that its requests free.
    """

    inputs: Kernels
    weights: Kernels
    inputs_memory: tuple[MemoryOp, ...] = ()
    weights_memory: tuple[MemoryOp, ...] = ()
    returning: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskWork:
    """Partition j for one micro-batch size.

    ``graph_memory`` and ``backward_memory`` share their block numbers: backward frees what the graph kept. An input or
    output that it does not free goes when the pipeline has passed it on. Everything else that a pass leaves is freed
    with its backward pass, or, without a graph, at the end of the pass.

    Attributes:
        forward: with or without a graph.
        recompute: the second forward pass of a checkpoint.
        backward: all of the backward pass.
        forward_memory: without a graph (a checkpoint's first pass).
        graph_memory: with a graph (plain forward, or recomputation).
        backward_memory: the backward pass.
        output_bytes: tensors that leave for the next partition, without skips.
        input_bytes: tensors that come from the one before, without skips.
        leaving: blocks of the outputs, then of the skips that are taken from it, as :attr:`Workload.skips`; for both
            forward passes. An input that is passed on keeps its name. -1: the simulation allocates the tensor when the
            pass has ended. Empty: all are -1.
        returning: blocks of the gradients of the inputs, then of the skips that arrive, of ``backward_memory``, or the
            gradient of an output that is passed on. -1 and empty: as above.
        nodes: autograd nodes that the task makes without a checkpoint; their sequence numbers order such tasks.
        learns: whether there is any gradient to compute; else no checkpoint is made and nothing runs backward.
        returns: for each of ``input_bytes``, whether a gradient goes back for it. Empty: for all of them.
        checkpointed: the work with a checkpoint, where it differs: it copies inputs that layers write to, and gradients
            that others hold too or that are laid out otherwise.
        split: the backward pass in two parts, if it was asked for.
    """

    forward: Kernels
    recompute: Kernels
    backward: Kernels
    forward_memory: tuple[MemoryOp, ...] = ()
    graph_memory: tuple[MemoryOp, ...] = ()
    backward_memory: tuple[MemoryOp, ...] = ()
    output_bytes: tuple[int, ...] = ()
    input_bytes: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    returning: tuple[int, ...] = ()
    nodes: int = 1
    learns: bool = True
    returns: tuple[bool, ...] = ()
    checkpointed: TaskWork | None = None
    split: SplitWork | None = None

    def kernels(self, kind: str) -> Kernels:
        """Of a pass: ``forward``, ``recompute``, ``backward``, ``backward_inputs`` or ``backward_weights``."""
        split = self.split or SplitWork(NOTHING, NOTHING)
        return {
            "forward": self.forward, "recompute": self.recompute, "backward": self.backward,
            "backward_inputs": split.inputs, "backward_weights": split.weights,
        }[kind]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SkipWork:
    """A skip tensor between two partitions.

    Where several partitions read a skip, there is one from each to the next, all with the same key.

    Attributes:
        key: its name.
        source: partition that had it before, to which its gradient goes.
        target: partition that reads it.
        bytes: by micro-batch size.
        returns: whether a gradient goes back for it.
        holder: partition on the device of the target from which that takes it; None: the source.
    """

    key: str
    source: int
    target: int
    bytes: Mapping[int, int]
    returns: bool = True
    holder: int | None = None

    @property
    def giver(self) -> int:
        """The partition from which the target takes it."""
        return self.source if self.holder is None else self.holder


@dataclass(frozen=True, slots=True)
class StaticMemory:
    """What a partition holds between steps, in bytes.

    Attributes:
        resident: each parameter and buffer; they are there before the first step.
        gradients: of all trained parameters together; they come with a step's first backward pass.
        state: each tensor of the optimizer's state; they come with the first update.
        temporary: each tensor that an update holds while it lasts.
        workspaces: of cuBLAS; partitions of one device share them.
    """

    resident: tuple[int, ...] = ()
    gradients: int = 0
    state: tuple[int, ...] = ()
    temporary: tuple[int, ...] = ()
    workspaces: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """All that stays, without workspaces."""
        return sum(self.resident) + self.gradients + sum(self.state)


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step of a partitioned model.

    Attributes:
        partitions: for each partition, the work by micro-batch size.
        microbatch_sizes: actual sizes, i = 0 .. m-1; for one run, keys of ``partitions`` (:meth:`chosen`).
        skips: skips that cross a boundary, in the order of their stashes.
        loss: loss and its gradient, with the concatenation of the outputs, on the last device.
        optimizer: update of each partition's parameters; empty for none.
        static_bytes: parameters, gradients, optimizer state and buffers, per partition; empty for none.
        static: the same tensor by tensor; empty: one block of ``static_bytes`` stands for all.
        loss_memory: requests of loss and gradient for the whole batch: ``input_name(0)`` is the output of the model,
            ``gradient_name(0)`` its gradient. Empty: the gradient is made, then the output is held no longer.
    """

    partitions: tuple[Mapping[int, TaskWork], ...]
    microbatch_sizes: tuple[int, ...]
    skips: tuple[SkipWork, ...] = ()
    loss: Kernels = field(default=NOTHING)
    optimizer: tuple[Kernels, ...] = ()
    static_bytes: tuple[int, ...] = ()
    static: tuple[StaticMemory, ...] = ()
    loss_memory: tuple[MemoryOp, ...] = ()

    @property
    def m(self) -> int:
        """Micro-batches."""
        return len(self.microbatch_sizes)

    @property
    def n(self) -> int:
        """Partitions."""
        return len(self.partitions)

    def task(self, i: int, j: int) -> TaskWork:
        """The work of micro-batch i on partition j."""
        return self.partitions[j][self.microbatch_sizes[i]]

    def placed(self, homes: Sequence[Hashable]) -> Workload:
        """The same where each device receives a skip once; ``homes``: where each partition is."""
        chains: dict[str, list[int]] = {}
        skips = []
        for skip in self.skips:
            chain = chains.setdefault(skip.key, [skip.source])
            chain.append(skip.target)
            giver = skip.source if skip.source == skip.target else holder(chain, skip.target, homes)
            skips.append(skip if giver == skip.source else replace(skip, holder=giver))
        if all(skip.holder is None for skip in skips):
            return self
        works = [
            {size: replace(work, leaving=_given(work, skips, j)) for size, work in works.items()}
            for j, works in enumerate(self.partitions)
        ]
        return replace(self, skips=tuple(skips), partitions=tuple(works))

    def needing_gradients(self, j: int, size: int) -> int:
        """How many of the tensors that leave a task need a gradient: outputs, and skips that depart."""
        skips = sum(skip.returns for skip in self.skips if skip.source == j != skip.target)
        outputs = self.partitions[j][size].output_bytes
        if j == self.n - 1:
            return len(outputs) + skips
        return sum(self.partitions[j + 1][size].returns or (True,) * len(outputs)) + skips

    def chosen(self, checkpointed: int) -> Workload:
        """The same with checkpoints for the first ``checkpointed`` micro-batches.

        If their work differs, they go under the negative of their size.
        """
        if all(work.checkpointed is None for works in self.partitions for work in works.values()):
            return self
        sizes = self.microbatch_sizes
        keys = (*(-size for size in sizes[:checkpointed]), *sizes[checkpointed:])
        occurring = dict.fromkeys(keys)
        return replace(
            self,
            partitions=tuple({key: _variant(works[abs(key)], key) for key in occurring} for works in self.partitions),
            microbatch_sizes=keys,
            skips=tuple(replace(skip, bytes={key: skip.bytes[abs(key)] for key in occurring}) for skip in self.skips),
        )


def _given(work: TaskWork, skips: Sequence[SkipWork], j: int) -> tuple[int, ...]:
    """What leaves partition j, where each skip is given as often as it is taken from there."""
    if not work.leaving:
        return ()
    outputs = work.leaving[: len(work.output_bytes)]
    own = (skip.key for skip in skips if skip.source == j != skip.target)
    blocks = dict(zip(own, work.leaving[len(outputs) :], strict=True))
    return (*outputs, *(blocks[skip.key] for skip in skips if skip.giver == j != skip.target))


def _variant(work: TaskWork, key: int) -> TaskWork:
    """The work of micro-batches under ``key`` in one run, without others."""
    if key < 0 and work.checkpointed is not None:
        return work.checkpointed
    return replace(work, checkpointed=None)
