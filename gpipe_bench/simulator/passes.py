"""Carries out the requests of passes, and holds what stays between steps: parameters, gradients, optimizer state.

A first backward pass makes the gradients of its parameters; later ones add to them, and free what they added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.simulator.allocator import Allocator, Block
from gpipe_bench.simulator.places import Places
from gpipe_bench.simulator.programs import Placed, Program
from gpipe_bench.simulator.workload import TaskWork, Workload

__all__ = ["Passes", "Table", "Tensor", "drop_all"]


class Tensor:
    """A block and how many hold it."""

    __slots__ = ("block", "device", "holders")

    def __init__(self, device: Allocator, block: Block, holders: int = 1) -> None:
        self.device = device
        self.block = block
        self.holders = holders

    def hold(self) -> Tensor:
        """One more holds it."""
        self.holders += 1
        return self

    def drop(self) -> None:
        """One holds it no more; the last one frees the block."""
        self.holders -= 1
        if not self.holders:
            self.device.free(self.block)


Table = dict[int, Tensor]


def drop_all(tensors: Iterable[Tensor]) -> None:
    """Every one of them is held by one less."""
    for tensor in tensors:
        tensor.drop()


class Passes:
    """The passes of all partitions, and their static memory.

    Args:
        workload: sizes.
        places: devices and streams.
        devices: an allocator each.
        keeps_gradients: whether gradients are set to zero between steps, rather than given up.

    Attributes:
        without_scratch: kinds of kernels for whose scratch memory there was no room once; they do without from then on.
    """

    def __init__(
        self, workload: Workload, places: Places, devices: Sequence[Allocator], *, keeps_gradients: bool
    ) -> None:
        self.without_scratch: set[int] = set()
        self._work, self._places, self._devices = workload, places, devices
        self._programs: dict[tuple[int, str, int], Program] = {}
        self._keeps_gradients = keeps_gradients
        # Gradients of each partition's parameters, once they are there.
        self._own_gradients: dict[int, list[Tensor]] = {}
        self._has_state = False
        self._settle()

    def new(self, j: int, nbytes: int, stream: int | None = None) -> Tensor:
        """A tensor of partition j, on its compute stream unless said otherwise."""
        allocator = self._devices[self._places.devices[j]]
        return Tensor(allocator, allocator.alloc(nbytes, self._places.computing[j] if stream is None else stream))

    def backward(self, j: int, work: TaskWork, graph: Placed | Table) -> Table:
        """Run a backward pass; gives its blocks, of which those that return are alive."""
        if j in self._own_gradients:
            return self.as_table(j, work, "backward", self.remembered(j, work, "backward", graph))
        self._own_gradients[j] = []
        table = self.run(j, work, "backward", self.as_table(j, work, "graph", graph))
        self._complete_gradients(j)
        return table

    def next_step(self) -> None:
        """Gradients are set to zero or given up."""
        if not self._keeps_gradients:
            for gradients in self._own_gradients.values():
                drop_all(gradients)
            self._own_gradients.clear()

    def _settle(self) -> None:
        """Parameters and buffers come to their devices."""
        workload = self._work
        if workload.static:
            for j, static in enumerate(workload.static):
                for nbytes in static.resident:
                    self.new(j, nbytes, self._places.devices[j])
            return
        for j, nbytes in enumerate(workload.static_bytes):
            if nbytes:
                self.new(j, nbytes, self._places.devices[j])

    def update(self) -> None:
        """The optimizer changes the parameters; the first time it makes its state."""
        for j, static in enumerate(self._work.static):
            if not self._has_state:
                for nbytes in static.state:
                    self.new(j, nbytes)
            if static.temporary:
                self.new(j, static.temporary).drop()
        self._has_state = True

    def _complete_gradients(self, j: int) -> None:
        """Gradients that were no blocks of the backward pass, such as copies of views."""
        if self._work.static:
            there = sum(tensor.block.requested for tensor in self._own_gradients[j])
            missing = self._work.static[j].gradients - there
            if missing > 0:
                self._own_gradients[j].append(self.new(j, missing))

    def _program(self, work: TaskWork, way: str) -> Program:
        """``plain``, ``graph`` or ``backward`` of a task; a checkpoint's, which keeps nothing but what passes on."""
        key = id(work), way, len(self.without_scratch)
        if key not in self._programs:
            ops = [
                op
                for op in (work.forward_memory if way == "plain" else getattr(work, f"{way}_memory"))
                if op.kind != "scratch" or op.block not in self.without_scratch
            ]
            if way == "plain":
                self._programs[key] = Program(ops, kept=work.leaving)
            elif way == "graph":
                self._programs[key] = Program(ops, kept=None)
            else:
                before = self._program(work, "graph").left if work.graph_memory else {}
                self._programs[key] = Program(ops, kept=work.returning, before=before)
        return self._programs[key]

    def remembered(self, j: int, work: TaskWork, way: str, before: Placed | Table | None) -> Placed | Table:
        """Run a pass as a program, or request by request where that cannot be done; gives what it leaves."""
        if before is None or isinstance(before, Placed):
            device, stream = self._devices[self._places.devices[j]], self._places.computing[j]
            placed = self._program(work, way).run(device, stream, before)
            if placed is not None:
                return placed
        return self.run(j, work, way, self.as_table(j, work, "graph", before or {}))

    def as_table(self, j: int, work: TaskWork, way: str, left: Placed | Table) -> Table:
        """What a program left, as tensors."""
        if not isinstance(left, Placed):
            return left
        device, stream = self._devices[self._places.devices[j]], self._places.computing[j]
        blocks = left.blocks(self._program(work, way).left, stream)
        return {name: Tensor(device, block) for name, block in blocks.items()}

    def run(self, j: int, work: TaskWork, way: str, table: Table) -> Table:
        """Carry out a task's own requests on ``table``; what passes on is left, of ``graph`` everything."""
        allocator, stream = self._devices[self._places.devices[j]], self._places.computing[j]
        new = len(self._own_gradients.get(j, ())) == 0
        for op in work.forward_memory if way == "plain" else getattr(work, f"{way}_memory"):
            if op.kind == "alloc":
                table[op.block] = Tensor(allocator, allocator.alloc(op.bytes, stream))
            elif op.kind == "scratch":
                self._scratch(allocator, op.block, op.bytes, stream)
            elif op.kind == "gradient" and new and self._work.static:
                self._own_gradients[j].append(table.pop(op.block))
            else:
                table.pop(op.block).drop()
        if way != "graph":
            passed = work.leaving if way == "plain" else work.returning
            drop_all(tensor for block, tensor in table.items() if block not in passed)
        return table

    def _scratch(self, allocator: Allocator, kind: int, nbytes: int, stream: int) -> None:
        """Memory for one kernel; once there is none, kernels of its kind do without (Conv.cpp, chooseAlgorithm)."""
        if kind not in self.without_scratch:
            try:
                allocator.free(allocator.alloc(nbytes, stream))
            except OutOfMemory:
                self.without_scratch.add(kind)
