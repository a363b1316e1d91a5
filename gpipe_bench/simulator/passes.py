"""Carries out the requests of passes, and holds what stays between steps: parameters, gradients, optimizer state.

A first backward pass makes the gradients of its parameters; later ones add to them, and free what they added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.simulator.allocator import Allocator, Block
from gpipe_bench.simulator.places import Places
from gpipe_bench.simulator.programs import Placed, Program
from gpipe_bench.simulator.workload import MemoryOp, TaskWork, Workload

__all__ = ["Graph", "OpenGraph", "Passes", "alike", "drop_all"]

Table = dict[int, Block]
"""Blocks of a task by name."""


class OpenGraph(NamedTuple):
    """What a pass with graph leaves in use, where others hold or use blocks of it.

    Attributes:
        placed: where all its blocks are.
        shared: those that others know.
    """

    placed: Placed
    shared: Table

    def awaited(self) -> frozenset[int] | None:
        """The shared blocks whose memory would not come back if they were given back; None if others hold one."""
        if any(block.holders > 1 for block in self.shared.values()):
            return None
        return frozenset(name for name, block in self.shared.items() if not block.owner.idle(block))


Graph = Placed | OpenGraph | Table
"""What a pass with graph leaves in use for its backward pass."""


def drop_all(blocks: Iterable[Block]) -> None:
    """Every one of them is held by one less."""
    for block in blocks:
        block.drop()


class Passes:
    """The passes of all partitions, and their static memory.

    Args:
        workload: sizes.
        places: devices and streams.
        devices: an allocator each.
        keeps_gradients: whether gradients are set to zero between steps, rather than given up.

    Attributes:
        without_scratch: kinds of kernels for whose scratch memory there was no room once; they do without from then on.
        gradients: of each partition's parameters, once they are there.
        has_state: whether there is an optimizer's state.
    """

    def __init__(
        self, workload: Workload, places: Places, devices: Sequence[Allocator], *, keeps_gradients: bool
    ) -> None:
        self.without_scratch: set[int] = set()
        self._work, self._places = workload, places
        # Allocator and compute stream of each partition.
        self._homes = [(devices[place], stream) for place, stream in zip(places.devices, places.computing, strict=True)]
        self._programs: dict[tuple[int, str, frozenset[int]], Program] = {}
        # Partitions that are alike share programs, and so what these remember.
        self._alike = alike(work for works in workload.partitions for work in works.values())
        self._keeps_gradients = keeps_gradients
        self.gradients: dict[int, list[Block]] = {}
        self.has_state = False
        self._settle()

    def new(self, j: int, nbytes: int) -> Block:
        """A block of partition j, on its compute stream."""
        allocator, stream = self._homes[j]
        return allocator.alloc(nbytes, stream)

    def plain(self, j: int, work: TaskWork) -> list[Block]:
        """Run a pass without graph; gives what leaves."""
        placed = self._at_once(j, work, "plain")
        if placed is None:
            table = self._one_by_one(j, work.forward_memory, {})
            drop_all(block for name, block in table.items() if name not in work.leaving)
            return [table[name] for name in work.leaving]
        return self._blocks(j, work, "plain", placed, work.leaving)

    def graph(self, j: int, work: TaskWork) -> Graph:
        """Run a pass with graph, of which all that is left belongs to the backward pass."""
        placed = self._at_once(j, work, "graph")
        return self._one_by_one(j, work.graph_memory, {}) if placed is None else placed

    def open_graph(self, j: int, work: TaskWork) -> tuple[OpenGraph | Table, list[Block]]:
        """Run a pass with graph; gives that and what leaves, which the graph holds too."""
        graph = self.graph(j, work)
        if isinstance(graph, Placed):
            graph = self.opened(j, work, graph)
        shared = graph.shared if isinstance(graph, OpenGraph) else graph
        return graph, [shared[name] for name in work.leaving]

    def opened(self, j: int, work: TaskWork, placed: Placed) -> OpenGraph:
        """A graph of which others know what leaves."""
        names = tuple(dict.fromkeys(work.leaving))
        return OpenGraph(placed, dict(zip(names, self._blocks(j, work, "graph", placed, names), strict=True)))

    def backward(self, j: int, work: TaskWork, graph: Graph) -> list[Block]:
        """Run a backward pass; gives what returns."""
        first = j not in self.gradients
        gradients = self._gradients(work) if first else ()
        returned = None
        if not isinstance(graph, dict):
            returned = self._backward_at_once(j, work, graph, gradients)
        if returned is None:
            ops = [op for op in work.backward_memory if op.kind != "gradient" or not gradients]
            table = self._one_by_one(j, ops, self._table(j, work, graph))
            returned = [table.pop(name) for name in (*work.returning, *gradients)]
            drop_all(table.values())
        split = len(work.returning)
        if first:
            self.gradients[j] = returned[split:]
            self._complete_gradients(j)
        return returned[:split]

    def next_step(self) -> None:
        """Gradients are set to zero or given up."""
        if not self._keeps_gradients:
            for gradients in self.gradients.values():
                drop_all(gradients)
            self.gradients.clear()

    def _settle(self) -> None:
        """Parameters and buffers come to their devices."""
        workload = self._work
        if workload.static:
            for j, static in enumerate(workload.static):
                for nbytes in static.resident:
                    self._on_default_stream(j, nbytes)
            return
        for j, nbytes in enumerate(workload.static_bytes):
            if nbytes:
                self._on_default_stream(j, nbytes)

    def _on_default_stream(self, j: int, nbytes: int) -> None:
        allocator, device = self._homes[j][0], self._places.devices[j]
        allocator.alloc(nbytes, device)

    def update(self) -> None:
        """The optimizer changes the parameters; the first time it makes its state."""
        for j, static in enumerate(self._work.static):
            if not self.has_state:
                for nbytes in static.state:
                    self.new(j, nbytes)
            if static.temporary:
                self.new(j, static.temporary).drop()
        self.has_state = True

    def _complete_gradients(self, j: int) -> None:
        """Gradients that were no blocks of the backward pass, such as copies of views."""
        if self._work.static:
            there = sum(block.requested for block in self.gradients[j])
            missing = self._work.static[j].gradients - there
            if missing > 0:
                self.gradients[j].append(self.new(j, missing))

    def _gradients(self, work: TaskWork) -> tuple[int, ...]:
        """Blocks that become the gradients of parameters that have none."""
        if not self._work.static:
            return ()
        return tuple(op.block for op in work.backward_memory if op.kind == "gradient")

    def _program(self, work: TaskWork, way: str, awaited: frozenset[int] = frozenset()) -> Program:
        """``plain``, ``graph``, ``backward`` of a task, or its ``first`` backward pass in a step."""
        key = self._alike[id(work)], way, awaited
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._make(work, way, awaited)
        return program

    def _make(self, work: TaskWork, way: str, awaited: frozenset[int]) -> Program:
        if way == "plain":
            return Program(self._possible(work.forward_memory), kept=work.leaving)
        if way == "graph":
            return Program(self._possible(work.graph_memory), kept=None)
        ops, kept = self._possible(work.backward_memory), work.returning
        before = self._program(work, "graph").left if work.graph_memory else {}
        if way == "first":
            ops, kept = [op for op in ops if op.kind != "gradient"], (*kept, *self._gradients(work))
        return Program(ops, kept=kept, before=before, awaited=awaited)

    def _possible(self, ops: Iterable[MemoryOp]) -> list[MemoryOp]:
        return [op for op in ops if op.kind != "scratch" or op.block not in self.without_scratch]

    def _at_once(self, j: int, work: TaskWork, way: str, before: Placed | None = None) -> Placed | None:
        """Run a pass as a program; None where that cannot be done."""
        return self._program(work, way).run(*self._homes[j], before)

    def _backward_at_once(
        self, j: int, work: TaskWork, graph: Placed | OpenGraph, gradients: tuple[int, ...]
    ) -> list[Block] | None:
        """Run a backward pass as a program; gives what returns, and the gradients of parameters that had none."""
        graph = OpenGraph(graph, {}) if isinstance(graph, Placed) else graph
        awaited = graph.awaited()
        if awaited is None:
            return None
        way = "first" if gradients else "backward"
        program = self._program(work, way, awaited)
        done = program.run(*self._homes[j], graph.placed)
        if done is None:
            return None
        for name in program.outstanding:
            self._homes[j][0].retire(graph.shared[name])
        return self._blocks(j, work, way, done, (*work.returning, *gradients))

    def _blocks(self, j: int, work: TaskWork, way: str, placed: Placed, names: Iterable[int]) -> list[Block]:
        """What a program left, in the order of ``names``."""
        requested = self._program(work, way).left
        return [placed.block(name, requested[name], *self._homes[j]) for name in names]

    def _table(self, j: int, work: TaskWork, graph: Graph) -> Table:
        """The blocks of a graph."""
        if isinstance(graph, OpenGraph):
            return self._table(j, work, graph.placed) | graph.shared
        if isinstance(graph, dict):
            return graph
        names = self._program(work, "graph").left
        return dict(zip(names, self._blocks(j, work, "graph", graph, names), strict=True))

    def _one_by_one(self, j: int, ops: Iterable[MemoryOp], table: Table) -> Table:
        """Make requests that cannot be made at once, as on a full device."""
        allocator, stream = self._homes[j]
        for op in ops:
            if op.kind == "alloc":
                table[op.block] = allocator.alloc(op.bytes, stream)
            elif op.kind == "scratch":
                self._scratch(allocator, op.block, op.bytes, stream)
            else:
                table.pop(op.block).drop()
        return table

    def _scratch(self, allocator: Allocator, kind: int, nbytes: int, stream: int) -> None:
        """Memory for one kernel; once there is none, kernels of its kind do without (Conv.cpp, chooseAlgorithm)."""
        if kind not in self.without_scratch:
            try:
                allocator.free(allocator.alloc(nbytes, stream))
            except OutOfMemory:
                self.without_scratch.add(kind)
                self._programs.clear()


def alike(works: Iterable[TaskWork]) -> dict[int, int]:
    """The id of each task's work -> that of the first work that is equal to it."""
    firsts: dict[object, list[TaskWork]] = {}
    found: dict[int, int] = {}
    for work in works:
        # Most are told apart by these, so that few long lists are compared.
        rows = work.forward_memory, work.graph_memory, work.backward_memory
        candidates = firsts.setdefault((work.backward, work.input_bytes, *map(len, rows)), [])
        first = next((one for one in candidates if one == work), None)
        if first is None:
            candidates.append(work)
        found[id(work)] = id(first or work)
    return found
