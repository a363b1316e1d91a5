"""A workload as one row of integers, which ``description.c`` reads: bytes and lifetimes of all that takes memory.

The passes of a task are rows of requests, which ``passes.c`` runs. A row is a code, a slot and bytes. Slots stand for
blocks of the task: first those that leave it, then what else a pass with graph leaves in use, then everything else.

    slot     0 .. leaving .. left .. slots
             │  outputs │ kept by the graph │ given back by the pass that asks for it

The first backward pass of a partition makes the gradients of its parameters; later ones add to them, and free what they
added. Where no task has a checkpoint, autograd sums up the gradients of all micro-batches before any becomes a
parameter's. It adds in place where it may: to a sum, and to a first gradient that is no view
(torch/csrc/autograd/input_buffer.cpp). So the second gradient of a linear layer's weight, which is a transposed one,
needs room for a third. The rows say what each of these needs; which one it is, is known when they run.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.kernels.kernel import NO_BLOCK
from gpipe_bench.results.timeline import KINDS
from gpipe_bench.simulator.workloads.workload import (
    NOTHING,
    MemoryOp,
    SplitWork,
    StaticMemory,
    TaskWork,
    Workload,
    gradient_name,
    input_name,
)

CODES: Final = ("alloc", "drop", "brief", "scratch", "let_go", "gradient", "view", "leaving", "kept")
"""What a row asks for, by its code; ``state.h`` has the same ones as ``ROW_ALLOC`` and so on."""

CODE_BITS: Final = 8
"""Bits of a code; the slot is above them."""

_ALLOC, _DROP, _BRIEF, _SCRATCH, _LET_GO, _GRADIENT, _VIEW, _LEAVING, _KEPT = range(len(CODES))
_GRADIENTS: Final = frozenset({"gradient", "view"})

_Blocks = dict[int, None]
"""Blocks in use, in order."""

_TOTAL: Final = 2**60
"""Sums of times and bytes are below this: of 64 bits some are left for losses, copies and updates."""


TASK_KINDS: Final = {
    kind: number for number, kind in enumerate((*KINDS, "collect", "loss", "microbatch_loss", "update", "begin"))
}
"""Kinds of tasks by their numbers in ``memory.h``. Those that run on no stream: the calling thread takes what a forward
pass gave; the loss of the batch, or of a micro-batch, is about to run; optimizers have updated; a step begins."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Where partitions are.

    Attributes:
        count: devices.
        devices: of each partition.
        device_of: of each stream.
        computing: the compute stream of each partition.
    """

    count: int
    devices: Sequence[int]
    device_of: Sequence[int]
    computing: Sequence[int]


def describe(
    workload: Workload,
    places: Streams,
    *,
    capacity: int,
    riding: bool,
    published: bool = False,
    scheduled: bool = False,
) -> array[int]:
    """The description of a run: records in the order of the structs in ``state.h``.

    Args:
        workload: sizes, as :meth:`Workload.chosen` gives them.
        places: devices and streams.
        capacity: bytes of each device; 0 for no limit.
        riding: whether skips ride through the partitions between.
        published: whether gradients are set to zero between steps, rather than given up, and checkpoints keep what
            their recomputation gave out.
        scheduled: whether a schedule runs all passes: then each task sums up its gradients by itself, and keeps
            gradients that come to it until it has run, unless they are handed over.
    """
    sizes = {size: number for number, size in enumerate(workload.partitions[0])}
    places_of_tasks = [(j, size) for j in range(workload.n) for size in sizes]
    tasks = [workload.partitions[j][size] for j, size in places_of_tasks]
    scratch = dict.fromkeys(op.block for work in tasks for op in _requests(work) if op.kind == "scratch")
    kernels = {block: number for number, block in enumerate(scratch)}
    names = _names(workload, tasks)
    inputs = zip(*(workload.task(i, 0).input_bytes for i in range(workload.m)), strict=True)
    found = record(
        (published, scheduled, riding, bool(workload.static), places.count, capacity, names, len(kernels), len(sizes)),
        places.device_of,
        [sizes[size] for size in workload.microbatch_sizes],
        # Micro-batches are views of the tensors of the batch.
        [sum(nbytes) for nbytes in inputs],
        range(len(tasks)),
    )
    skips = [
        record((skip.source, skip.target, skip.returns), [skip.bytes.get(size, 0) for size in sizes])
        for skip in workload.skips
    ]
    partitions = [_partition(workload, places, j, riding=riding) for j in range(workload.n)]
    kinds = [
        lowered_task(work, kernels, hands_over=workload.needing_gradients(*place) == 1)
        for place, work in zip(places_of_tasks, tasks, strict=True)
    ]
    losses = [lowered_loss(workload, abs(size), len(workload.partitions[-1][size].output_bytes)) for size in sizes]
    losses.append(lowered_loss(workload, sum(map(abs, workload.microbatch_sizes)), 1))
    for records in (skips, partitions, kinds, losses):
        found += (len(records), *chain.from_iterable(records))
    return array("q", found)


def check_sizes(workload: Workload, steps: int) -> None:
    """Check that the clock and the memory, which count with 64 bits, can add up all times and bytes of a run.

    Args:
        workload: as :meth:`Workload.chosen` gives it.
        steps: of training.

    Raises:
        ConfigError: they cannot.
    """
    tasks = (work for works in workload.partitions for work in works.values())
    total = workload.m * steps * sum(map(_amount, tasks))
    if total >= _TOTAL:
        rule = f"bytes and nanoseconds of a simulation must add up to less than {_TOTAL:.1e}"
        raise ConfigError([f"{rule}, got {total:.1e}; use a smaller batch, fewer steps or a smaller model"])


def _amount(work: TaskWork) -> int:
    halves = work.split or SplitWork(NOTHING, NOTHING)
    passes = work.forward, work.recompute, work.backward, halves.inputs, halves.weights
    own = sum(work.input_bytes) + sum(work.output_bytes) + sum(kernels.duration_ns for kernels in passes)
    return own + sum(op.bytes for op in _requests(work))


def _requests(work: TaskWork) -> Iterator[MemoryOp]:
    halves = work.split or SplitWork(NOTHING, NOTHING)
    rows = work.forward_memory, work.graph_memory, work.backward_memory, halves.inputs_memory, halves.weights_memory
    return chain.from_iterable(rows)


def _names(workload: Workload, tasks: Iterable[TaskWork]) -> int:
    """How many names a task may have for its inputs and incoming gradients."""
    lengths = [len(row) for work in tasks for row in (work.input_bytes, work.output_bytes)]
    least = min(op.block for work in tasks for op in (MemoryOp("free", -1), *_requests(work)))
    return max(2 * (max(lengths) + len(workload.skips)) + 2, -1 - least)


def _partition(workload: Workload, places: Streams, j: int, *, riding: bool) -> list[int]:
    """Where a partition is, the skips that come and go there, and what stays there between tasks."""
    static = StaticMemory()
    if workload.static:
        static = workload.static[j]
    elif workload.static_bytes and workload.static_bytes[j]:
        static = StaticMemory(resident=(workload.static_bytes[j],))
    neighbours = zip(places.devices[:j], workload.static, strict=False)
    shared = max((len(one.workspaces) for device, one in neighbours if device == places.devices[j]), default=0)
    crossing = {number: skip for number, skip in enumerate(workload.skips) if skip.source != skip.target}
    ending = [number for number, skip in crossing.items() if skip.target == j]
    through = [number for number, skip in crossing.items() if riding and skip.source < j < skip.target]
    departing = [number for number, skip in crossing.items() if skip.giver == j]
    awaited = [number for number, skip in crossing.items() if skip.source == j]
    return record(
        (places.devices[j], places.computing[j], static.gradients, len(ending)),
        ending + through,
        departing,
        awaited,
        static.resident + static.workspaces[shared:],
        static.state,
        static.temporary,
    )


def record(integers: Iterable[int], *lists: Sequence[int]) -> list[int]:
    """Integers, then lists with their lengths before them, as ``description.c`` reads them."""
    found = [*integers]
    for numbers in lists:
        found.append(len(numbers))
        found += numbers
    return found


def lowered_task(work: TaskWork, kernels: Mapping[int, int], *, hands_over: bool) -> list[int]:
    """The record of a task.

    Args:
        work: the task.
        kernels: a number for each kind of kernel that asks for scratch memory.
        hands_over: whether, with a schedule, the task gets the only reference to the gradient of its output.
    """
    lowered = LoweredTask(work, kernels)
    integers = (lowered.slots, lowered.left, lowered.splits, lowered.later, hands_over, lowered.passes_back)
    return record(integers, *lowered.lists)


def lowered_loss(workload: Workload, samples: int, outputs: int) -> list[int]:
    """The record of the loss of so many samples; without requests of its own it makes a gradient of each output."""
    if not workload.loss_memory:
        gradients = (number for place in range(outputs) for number in (_ALLOC | place << CODE_BITS, -1))
        return record((outputs,), [*gradients, _LET_GO, 0])
    batch, slots = sum(map(abs, workload.microbatch_sizes)), {gradient_name(0): 0}
    rows: list[int] = []
    for kind, block, nbytes in workload.loss_memory:
        code = _LET_GO if block == input_name(0) else _ALLOC if kind == "alloc" else _DROP
        slot = 0 if code == _LET_GO else slots.setdefault(block, len(slots))
        rows += (code | slot << CODE_BITS, nbytes * samples // batch)
    return record((len(slots),), rows)


class LoweredTask:
    """A task as the memory reads it.

    Args:
        work: the task.
        kernels: a number for each kind of kernel that asks for scratch memory.

    Attributes: those of ``Kind`` in ``state.h``; its lists are in ``lists``.
    """

    def __init__(self, work: TaskWork, kernels: Mapping[int, int]) -> None:
        self._kernels = kernels
        self._own = dict.fromkeys(name for name in work.leaving if name > NO_BLOCK)
        left = self._own | _left(work.graph_memory)
        self._slots = {name: slot for slot, name in enumerate(left)}
        self.left = len(left)
        self.splits = work.split is not None
        halves = self._halves(work.split or SplitWork(NOTHING, NOTHING), left)
        self.later = len(self._slots)
        self.passes_back = min(work.returning, default=0) < NO_BLOCK
        kept, early = _kept_names(work), work.split.inputs_memory if work.split else ()
        self.lists: tuple[Sequence[int], ...] = (
            work.output_bytes,
            work.input_bytes,
            work.returns or (True,) * len(work.input_bytes),
            self._named(work.leaving),
            [name in kept for name in self._own],
            sorted(-1 - name // 2 for name in kept if name < NO_BLOCK),
            self._plain(work.forward_memory),
            self._rows(work.graph_memory, {}),
            [-2 - op.block for op in early if op.kind == "free" and op.block < NO_BLOCK],
            *self._back(work.backward_memory, work.returning, left.copy()),
            *halves,
        )
        self.slots = len(self._slots)

    def _slot(self, name: int) -> int:
        return self._slots.setdefault(name, len(self._slots))

    def _named(self, names: Sequence[int]) -> list[int]:
        """Slots of the task's own blocks among ``names``."""
        return [self._slot(name) if name > NO_BLOCK else name for name in names]

    def _rows(self, ops: Sequence[MemoryOp], alive: _Blocks) -> list[int]:
        """Rows of requests; what is given back as soon as it was asked for is one row.

        Args:
            ops: the requests.
            alive: blocks in use before them; afterwards those that they leave in use.
        """
        rows: list[int] = []
        sizes: dict[int, int] = {}
        newest: int | None = None
        for kind, block, nbytes in ops:
            if kind == "scratch":
                rows += (_SCRATCH | self._kernels[block] << CODE_BITS, nbytes)
                newest = None
            elif kind == "alloc":
                rows += (_ALLOC | self._slot(block) << CODE_BITS, nbytes)
                sizes[block] = nbytes
                alive[block] = None
                newest = block
            else:
                alive.pop(block, None)
                if kind == "free" and block == newest:
                    rows[-2] += _BRIEF - _ALLOC
                else:
                    rows += self._freed(kind, block, sizes)
                newest = None
        return rows

    def _freed(self, kind: str, block: int, sizes: Mapping[int, int]) -> tuple[int, int]:
        """The row of something that is given back; ``sizes``: bytes of blocks that the pass has asked for."""
        if block < NO_BLOCK:
            return _LET_GO | -2 - block << CODE_BITS, 0
        code = _LEAVING if block in self._own else _DROP
        if kind in _GRADIENTS:
            code = _VIEW if kind == "view" and block in sizes else _GRADIENT
        return code | self._slot(block) << CODE_BITS, sizes[block] if code == _VIEW else 0

    def _plain(self, ops: Sequence[MemoryOp]) -> list[int]:
        """Rows of a pass without graph, which gives back at its end what does not leave."""
        alive: _Blocks = {}
        rows = self._rows(ops, alive)
        for name in alive:
            if name not in self._own:
                rows += (_DROP | self._slot(name) << CODE_BITS, 0)
        return rows

    def _back(
        self, ops: Sequence[MemoryOp], returning: Sequence[int], alive: _Blocks, later: Sequence[MemoryOp] = ()
    ) -> list[list[int]]:
        """A backward pass or a half of it, as ``Back`` in ``state.h`` lists it.

        Args:
            ops: its requests.
            returning: as of the task.
            alive: blocks in use before it; afterwards those that are in use when its last request was made.
            later: requests of the half that follows; if there are none, it gives back at its end what is in use.
        """
        rows = self._rows(ops, alive)
        made = [op.block for op in ops if op.kind in _GRADIENTS]
        stays = {*returning, *made}
        for name in () if later else self._own | alive:
            if name not in stays:
                # Outputs of a recomputation are given back earlier where they are not kept.
                rows += ((_KEPT if name in self._own else _DROP) | self._slot(name) << CODE_BITS, 0)
        freed = {op.block for op in later if op.kind == "free"}
        shared = [name for name in dict.fromkeys(returning) if name > NO_BLOCK and name in freed]
        return [self._named(returning), self._named(shared), self._named(made), rows]

    def _halves(self, split: SplitWork, left: _Blocks) -> list[list[int]]:
        """I, then W; where a task cannot be split, I does all."""
        alive, later = left.copy(), split.weights_memory
        inputs = self._back(split.inputs_memory, split.returning, alive, later)
        if not later:
            return [*inputs, [], [], [], []]
        freed = {op.block for op in later if op.kind == "free"}
        between = {name: None for name in alive if name in freed or name not in split.returning}
        return [*inputs, *self._back(later, (), between)]


def _left(ops: Iterable[MemoryOp]) -> _Blocks:
    """Blocks that a row of requests leaves in use."""
    left: _Blocks = {}
    for kind, block, _ in ops:
        if kind == "alloc":
            left[block] = None
        elif kind == "free":
            left.pop(block, None)
    return left


def _kept_names(work: TaskWork) -> frozenset[int]:
    """Names of the inputs and outputs that the graph of a task keeps."""
    freed = {op.block for op in work.backward_memory if op.kind not in {"alloc", "scratch"}}
    inputs = {name for name in freed if name < NO_BLOCK and not name % 2}
    return frozenset(inputs | freed.intersection(work.leaving))
