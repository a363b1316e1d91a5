"""Carries out the requests of passes.

What a pass asks for, and of what, is said by :mod:`tests.simulator.oracle.ways`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.simulator.tracing.steps import NO_BLOCK
from gpipe_bench.simulator.workloads.workload import MemoryOp, TaskWork, Workload
from tests.simulator.oracle.allocator import Allocator, Block, drop_all
from tests.simulator.oracle.lasting import Lasting
from tests.simulator.oracle.places import Places
from tests.simulator.oracle.pools import rounded
from tests.simulator.oracle.ways import (
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

__all__ = ["Graph", "Passes"]

Table = dict[int, Block]
"""Blocks of a task by name."""


Graph = Table
"""What a pass with graph leaves in use for its backward pass."""


class Passes:
    """The passes of all partitions.

    Args:
        workload: sizes.
        places: devices and streams.
        devices: an allocator each.
        published: whether gradients are set to zero between steps, rather than given up, and checkpoints keep what
            their recomputation gave out.
        scheduled: whether a schedule runs all passes: then each task sums up its gradients by itself, and keeps
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
        self._published, self._scheduled = published, scheduled
        self._again = GRAPH if published and not scheduled else RECOMPUTE
        self._kept: dict[int, frozenset[int]] = {}
        self.lasting = Lasting(workload, places, self._homes, keeps_gradients=published)

    def new(self, j: int, nbytes: int) -> Block:
        """A block of partition j, on its compute stream."""
        allocator, stream = self._homes[j]
        return allocator.alloc(nbytes, stream)

    def kept(self, work: TaskWork) -> frozenset[int]:
        """What the graph of a task keeps of what others know: names of inputs and of what leaves."""
        if id(work) not in self._kept:
            self._kept[id(work)] = kept_names(work)
        return self._kept[id(work)]

    def plain(self, j: int, work: TaskWork) -> Table:
        """Run a pass without graph; gives what leaves of its own."""
        names = own_names(work.leaving)
        table = self._one_by_one(j, self._requests(work, PLAIN), {}, {})
        drop_all(block for name, block in table.items() if name not in names)
        return {name: table[name] for name in names}

    def graph(self, j: int, work: TaskWork) -> Table:
        """Run a recomputation, of which all that is left belongs to the backward pass."""
        return self._one_by_one(j, self._requests(work, self._again), {}, {})

    def open_graph(self, j: int, work: TaskWork) -> tuple[Table, Table]:
        """Run a pass with graph; gives that, and what leaves of its own, held once more where the graph keeps it."""
        made, kept = self._one_by_one(j, self._requests(work, GRAPH), {}, {}), self.kept(work)
        left = {name: made[name] for name in own_names(work.leaving)}
        graph = {name: block for name, block in made.items() if name not in left or name in kept}
        for name in left.keys() & kept:
            left[name].hold()
        return graph, left

    def backward(
        self,
        j: int,
        work: TaskWork,
        graph: Graph,
        lent: Table,
        *,
        is_open: bool,
        hands_over: bool,
        later: Sequence[MemoryOp] = (),
    ) -> Table:
        """Run a backward pass, or a half of it; gives what returns of its own.

        Args:
            j: the partition.
            work: the task.
            graph: its graph.
            lent: by name the gradients that came to it and the inputs that its graph kept. Whoever calls this gives
                them back afterwards; those that nobody else holds count as in use until the pass needs them no more.
            is_open: whether the graph was made by the forward pass, or is that of a cell.
            hands_over: whether, with a schedule, a gradient that came goes amid the pass.
            later: requests of the half that follows; if there are any, everything else stays in ``graph`` for it.
        """
        way = self._way(j, work, is_open=is_open)
        made = new_gradients(work) if way.gradients == "made" else ()
        requests = self._requests(work, way, last_needed(way, lent, hands_over=hands_over))
        table = self._one_by_one(j, requests, graph, lent)
        if later:
            freed = {op.block for op in later if op.kind == "free"}
            own = own_names(work.returning)
            return {name: table[name].hold() if name in freed else table.pop(name) for name in own}
        found = {name: table.pop(name) for name in (*own_names(work.returning), *made)}
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

    def _one_by_one(self, j: int, ops: Iterable[MemoryOp], table: Table, lent: Table) -> Table:
        """Make requests."""
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
