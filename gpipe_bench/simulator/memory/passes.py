"""Carries out the requests of passes.

What a pass asks for, and of what, is said by :mod:`gpipe_bench.simulator.memory.ways`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.simulator.memory.allocator import Allocator, Block, drop_all
from gpipe_bench.simulator.memory.lasting import Lasting
from gpipe_bench.simulator.memory.pools import rounded
from gpipe_bench.simulator.memory.programs import Placed, Program
from gpipe_bench.simulator.memory.ways import (
    GRAPH,
    PLAIN,
    RECOMPUTE,
    Lent,
    Way,
    backward_requests,
    kept_names,
    last_needed,
    new_gradients,
    own_names,
)
from gpipe_bench.simulator.tracing.steps import NO_BLOCK
from gpipe_bench.simulator.virtual_time.places import Places
from gpipe_bench.simulator.workloads.workload import MemoryOp, TaskWork, Workload

__all__ = ["Graph", "OpenGraph", "Passes", "alike"]

Table = dict[int, Block]
"""Blocks of a task by name."""


class OpenGraph(NamedTuple):
    """What a pass with graph leaves in use, where others hold or use blocks of it.

    Attributes:
        placed: where all its blocks are, and those that it does not keep.
        shared: those of its own that others know.
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


class Passes:
    """The passes of all partitions.

    Args:
        workload: sizes.
        places: devices and streams.
        devices: an allocator each.
        published: whether gradients are set to zero between steps, rather than given up, and checkpoints keep what
            their recomputation gave out.
        scheduled: whether the backward pass is scheduled: then each task sums up its gradients by itself, and keeps
            gradients that come to it until it has run, unless they are handed over.

    Attributes:
        without_scratch: kinds of kernels for whose scratch memory there was no room once; they do without from then on.
        lasting: parameters, gradients and optimizer state.
    """

    def __init__(
        self,
        workload: Workload,
        places: Places,
        devices: Sequence[Allocator],
        *,
        published: bool,
        scheduled: bool = False,
    ) -> None:
        self.without_scratch: set[int] = set()
        self._work, self._places = workload, places
        # Allocator and compute stream of each partition.
        self._homes = [(devices[place], stream) for place, stream in zip(places.devices, places.computing, strict=True)]
        self._programs: dict[tuple[int, Way, frozenset[int], Lent], Program] = {}
        # Partitions that are alike share programs, and so what these remember.
        self._alike = alike(work for works in workload.partitions for work in works.values())
        self._published, self._scheduled = published, scheduled
        self._again = GRAPH if published else RECOMPUTE
        self._kept: dict[int, frozenset[int]] = {}
        self.lasting = Lasting(workload, places, self._homes, keeps_gradients=published)

    def new(self, j: int, nbytes: int) -> Block:
        """A block of partition j, on its compute stream."""
        allocator, stream = self._homes[j]
        return allocator.alloc(nbytes, stream)

    def kept(self, work: TaskWork) -> frozenset[int]:
        """What the graph of a task keeps of what others know: names of inputs and of what leaves."""
        key = self._alike[id(work)]
        if key not in self._kept:
            self._kept[key] = kept_names(work)
        return self._kept[key]

    def closed(self, work: TaskWork) -> dict[str, Program]:
        """The passes of a checkpoint whose gradients are added to others."""
        backward = Way("backward", "added", scheduled=self._scheduled, keeps=self._published)
        ways = {"forward": PLAIN, "recompute": self._again, "backward": backward}
        return {name: self._program(work, way) for name, way in ways.items()}

    def plain(self, j: int, work: TaskWork) -> Table:
        """Run a pass without graph; gives what leaves of its own."""
        names = own_names(work.leaving)
        placed = self._at_once(j, work, PLAIN)
        if placed is None:
            table = self._one_by_one(j, self._requests(work, PLAIN), {}, {})
            drop_all(block for name, block in table.items() if name not in names)
            return {name: table[name] for name in names}
        return self._blocks(j, work, PLAIN, placed, names)

    def graph(self, j: int, work: TaskWork) -> Placed | Table:
        """Run a recomputation, of which all that is left belongs to the backward pass."""
        return self._graph(j, work, self._again)

    def _graph(self, j: int, work: TaskWork, way: Way) -> Placed | Table:
        placed = self._at_once(j, work, way)
        return self._one_by_one(j, self._requests(work, way), {}, {}) if placed is None else placed

    def open_graph(self, j: int, work: TaskWork) -> tuple[OpenGraph | Table, Table]:
        """Run a pass with graph; gives that, and what leaves of its own, held once more where the graph keeps it."""
        made, kept = self._graph(j, work, GRAPH), self.kept(work)
        graph: OpenGraph | Table
        if isinstance(made, Placed):
            left = self.left(j, work, made)
            graph = self.opened(work, made, left)
        else:
            left = {name: made[name] for name in own_names(work.leaving)}
            graph = {name: block for name, block in made.items() if name not in left or name in kept}
        for name in left.keys() & kept:
            left[name].hold()
        return graph, left

    def left(self, j: int, work: TaskWork, placed: Placed) -> Table:
        """What leaves a pass with graph of its own."""
        return self._blocks(j, work, GRAPH, placed, own_names(work.leaving))

    def opened(self, work: TaskWork, placed: Placed, left: Table) -> OpenGraph:
        """A graph of which others know what left, as far as it keeps that."""
        kept = self.kept(work)
        return OpenGraph(placed, {name: block for name, block in left.items() if name in kept})

    def backward(self, j: int, work: TaskWork, graph: Graph, lent: Table, *, is_open: bool) -> Table:
        """Run a backward pass; gives what returns of its own.

        Args:
            j: the partition.
            work: the task.
            graph: its graph.
            lent: by name the gradients that came to it and the inputs that its graph kept. Whoever calls this gives
                them back afterwards; those that nobody else holds count as in use until the pass needs them no more.
            is_open: whether the graph was made by the forward pass.
        """
        way = self._way(j, work, is_open=is_open)
        made = new_gradients(work) if way.gradients == "made" else ()
        names = (*own_names(work.returning), *made)
        found = None if isinstance(graph, dict) else self._backward_at_once(j, work, graph, (way, names, lent))
        if found is None:
            requests = self._requests(work, way, last_needed(work, way, lent))
            table = self._one_by_one(j, requests, self._table(j, work, graph, way), lent)
            found = {name: table.pop(name) for name in names}
            drop_all(table.values())
        if j in self.lasting.gradients:
            self.lasting.alone.discard(j)
        else:
            self.lasting.make(j, [found.pop(name) for name in made], is_open=is_open)
        return found

    def _way(self, j: int, work: TaskWork, *, is_open: bool) -> Way:
        """How a backward pass is run."""
        keeps = self._published and not is_open
        if j not in self.lasting.gradients and self._work.static and new_gradients(work):
            return Way("backward", "made", is_open, self._scheduled, keeps)
        # Those that are kept from step to step were summed up by older rules.
        summed = is_open and j in self.lasting.alone and not self._scheduled and not self._published
        return Way("backward", "summed" if summed else "added", is_open, self._scheduled, keeps)

    def _program(self, work: TaskWork, way: Way, awaited: frozenset[int] = frozenset(), lent: Lent = ()) -> Program:
        """The requests of a pass of a task."""
        key = self._alike[id(work)], way, awaited, lent
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._make(work, way, awaited, lent)
        return program

    def _make(self, work: TaskWork, way: Way, awaited: frozenset[int], lent: Lent) -> Program:
        requests = self._requests(work, way, lent)
        if way == PLAIN:
            return Program(requests, kept=work.leaving)
        if way in (GRAPH, RECOMPUTE):
            return Program(requests, kept=None)
        kept = (*work.returning, *(new_gradients(work) if way.gradients == "made" else ()))
        before = self._program(work, GRAPH).left if work.graph_memory else {}
        gone = self._gone(work, way)
        before = {name: nbytes for name, nbytes in before.items() if name not in gone}
        return Program(requests, kept=kept, before=before, awaited=awaited, lent=dict(lent))

    def _gone(self, work: TaskWork, way: Way) -> frozenset[int]:
        """What a graph made and does not keep, once that has been passed on."""
        return frozenset() if way.keeps else frozenset(own_names(work.leaving)) - self.kept(work)

    def _requests(self, work: TaskWork, way: Way, lent: Lent = ()) -> Sequence[MemoryOp]:
        """The requests of a pass, without those for scratch memory that kernels do without."""
        ops: Sequence[MemoryOp] = work.forward_memory if way == PLAIN else work.graph_memory
        if way.name == "backward":
            ops = backward_requests(work, way, {name for name, _ in lent})
        elif way == RECOMPUTE:
            gone = [name for name in own_names(work.leaving) if name not in self.kept(work)]
            ops = [*ops, *(MemoryOp("free", name) for name in gone)]
        if not self.without_scratch:
            return ops
        return [op for op in ops if op.kind != "scratch" or op.block not in self.without_scratch]

    def _at_once(self, j: int, work: TaskWork, way: Way, before: Placed | None = None) -> Placed | None:
        """Run a pass as a program; None where that cannot be done."""
        return self._program(work, way).run(*self._homes[j], before)

    def _backward_at_once(
        self, j: int, work: TaskWork, graph: Placed | OpenGraph, asked: tuple[Way, Sequence[int], Table]
    ) -> Table | None:
        """Run a backward pass as a program; ``asked``: how, what it is to leave, and what it is lent."""
        way, names, lent = asked
        graph = OpenGraph(graph, {}) if isinstance(graph, Placed) else graph
        awaited = graph.awaited()
        if awaited is None:
            return None
        program = self._program(work, way, awaited, last_needed(work, way, lent))
        done = program.run(*self._homes[j], graph.placed)
        if done is None:
            return None
        for name in program.outstanding:
            self._homes[j][0].retire(graph.shared[name])
        return {name: done.block(name, program.left[name], *self._homes[j]) for name in names}

    def _blocks(self, j: int, work: TaskWork, way: Way, placed: Placed, names: Iterable[int]) -> Table:
        """What a program left, by name."""
        requested = self._program(work, way).left
        return {name: placed.block(name, requested[name], *self._homes[j]) for name in names}

    def _table(self, j: int, work: TaskWork, graph: Graph, way: Way) -> Table:
        """The blocks of a graph."""
        if isinstance(graph, dict):
            return graph
        placed, shared = graph if isinstance(graph, OpenGraph) else (graph, {})
        gone = self._gone(work, way)
        names = [name for name in self._program(work, GRAPH).left if name not in gone]
        return self._blocks(j, work, GRAPH, placed, names) | shared

    def _one_by_one(self, j: int, ops: Iterable[MemoryOp], table: Table, lent: Table) -> Table:
        """Make requests that cannot be made at once, as on a full device."""
        allocator, stream = self._homes[j]
        # Bytes that count as in use no more, asked for and as allocated, until whoever lent them gives them back.
        live = allocated = 0
        for op in ops:
            if op.kind == "alloc":
                table[op.block] = allocator.alloc(op.bytes, stream)
            elif op.kind == "scratch":
                self._scratch(allocator, op.block, op.bytes, stream)
            elif op.block < NO_BLOCK:
                nbytes = lent[op.block].requested
                allocator.count(-nbytes, -rounded(nbytes), 0, 0)
                live, allocated = live + nbytes, allocated + rounded(nbytes)
            else:
                table.pop(op.block).drop()
        allocator.count(live, allocated, 0, 0)
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
