"""The memory of a partition as an automaton: its compute stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpipe_bench.simulator.memory.allocator import Block, drop_all
from gpipe_bench.simulator.memory.passes import OpenGraph, Passes
from gpipe_bench.simulator.memory.pools import State
from gpipe_bench.simulator.memory.programs import Placed
from gpipe_bench.simulator.memory.request_rows import Done
from gpipe_bench.simulator.memory.tally import Tally
from gpipe_bench.simulator.memory.ways import own_names
from gpipe_bench.simulator.memory_states.free_states import Made
from gpipe_bench.simulator.memory_states.pool_states import Group, spots
from gpipe_bench.simulator.memory_states.straight import LONG, Out, QuickPass, Spots, Straight
from gpipe_bench.simulator.tracing.steps import NO_BLOCK
from gpipe_bench.simulator.virtual_time.places import Places
from gpipe_bench.simulator.workloads.workload import TaskWork, Workload, gradient_name, input_name

__all__ = ["LEFT", "RETURNED", "SHARED", "HomeStates"]

LEFT, RETURNED, SHARED = range(3)
"""Queues: outputs that were sent on, gradients that were sent back, outputs that a graph holds until it has run."""

Given = dict[int, Block]
"""Blocks by the place of their tensor among what a task gives out."""

_USER: Final = 1
_NOTHING: Final = State(())


class _Held(NamedTuple):
    """What a compute stream's blocks hold between passes.

    Attributes:
        stack: graphs of tasks without checkpoint, the last one first: (graph, the others).
        outputs: of the last partition: ((blocks, bytes asked for), the others).
        graph: of a recomputation.
        loss: the gradient of the outputs.
        gradients: of the parameters, once they are there.
        state: whether there is an optimizer's state.
    """

    stack: tuple[Placed, Any] | None = None
    outputs: tuple[tuple[Group, int], Any] | None = None
    graph: Placed | None = None
    loss: Group | None = None
    gradients: Group | None = None
    state: bool = False


class HomeStates(Straight):
    """The compute stream of a partition.

    Args:
        workload: of all partitions.
        j: the partition.
        checkpoints: whether any of its tasks has a checkpoint.
        queues: of blocks on their way.
        ways: in how many ways they leave.

    Attributes:
        base: bytes in use at the start: as allocated, and as asked for.
    """

    def __init__(self, workload: Workload, j: int, *, checkpoints: bool, queues: int = 3, ways: int = 1) -> None:
        super().__init__(queues, ways)
        # Beside checkpoints the first partition's task without keeps what comes until it has run.
        self._lends = j > 0 or not checkpoints
        self._works, self._first, self._last = workload.partitions[j], j == 0, j == workload.n - 1
        own = Workload(
            (self._works,),
            workload.microbatch_sizes,
            static_bytes=workload.static_bytes[j : j + 1],
            static=workload.static[j : j + 1],
        )
        places = Places([0], copy_streams=False, transfer="direct")
        self._passes = Passes(own, places, [self.allocator], published=False)
        if self._first:
            for nbytes in zip(*(self._works[size].input_bytes for size in workload.microbatch_sizes), strict=True):
                self.new(sum(nbytes))
        self._quick: dict[int, QuickPass | None] = {}
        self._graph: tuple[Made, Made] | None = None
        self._graphs: dict[tuple[tuple[int, int], ...], Placed] = {}
        self.base = self.allocator.allocated, self.allocator.live
        self.start = self.enter(((),) * queues, _Held())

    def forward(self, held: _Held, size: int) -> tuple[list[Group], _Held]:
        """The first pass of a checkpoint."""
        work = self._works[size]
        left = self._given(work.leaving, self.leaving_bytes(size), self._passes.plain(0, work))
        return self._leave(held, left, left)

    def forward_task(self, held: _Held, size: int) -> tuple[list[Group], _Held]:
        """The forward pass of a task without checkpoint, whose graph may keep what it gives out."""
        work = self._works[size]
        graph, shared = self._passes.open_graph(0, work)
        assert isinstance(graph, OpenGraph)  # noqa: S101 - a device without limit is never full
        held = held._replace(stack=self.push(self._one_of(graph.placed), held.stack))
        left = self._given(work.leaving, self.leaving_bytes(size), shared)
        kept = [id(block) for block in graph.shared.values()]
        return self._leave(held, {place: block for place, block in left.items() if id(block) not in kept}, left)

    def leaving_bytes(self, size: int) -> tuple[int, ...]:
        """Bytes of the tensors that leave a task."""
        return self._works[size].output_bytes

    def returning_bytes(self, size: int) -> tuple[int, ...]:
        """Bytes of what comes into a task, and so of the gradients that leave it."""
        return self._works[size].input_bytes

    def _given(self, names: Sequence[int], sizes: Sequence[int], found: Mapping[int, Block]) -> Given:
        """A block for each of some tensors but those that are passed on, which are on a copy stream."""
        given = {}
        for place, nbytes in enumerate(sizes):
            name = names[place] if names else NO_BLOCK
            if name >= NO_BLOCK:
                given[place] = found[name] if name in found else self.new(nbytes)
        return given

    def _leave(self, held: _Held, own: Given, left: Given) -> tuple[list[Group], _Held]:
        """Blocks ``left`` are given out, of which nobody else holds those in ``own``."""
        if self._last:
            entry = spots(own.values()), sum(block.requested for block in left.values())
            return [], held._replace(outputs=self.push(entry, held.outputs))
        return self._send(own, back=False), held

    def groups(self, where: Spots, *, back: bool) -> list[tuple[int, Group]]:
        """What a pass gives out, as what goes together, with its queue; ``back``: whether a backward pass gives it."""
        return [(RETURNED if back else LEFT, tuple(where.values()))]

    def _send(self, blocks: Given, *, back: bool) -> list[Group]:
        """Put what a pass gives out on its way."""
        where = dict(zip(blocks, spots(blocks.values()), strict=True))
        return [self.send(queue, group) for queue, group in self.groups(where, back=back)]

    def loss(self, held: _Held) -> tuple[list[Group], _Held]:
        """Outputs are concatenated, and their gradient is made."""
        outputs: list[tuple[Group, int]] = []
        while held.outputs is not None:
            outputs.append(held.outputs[0])
            held = held._replace(outputs=held.outputs[1])
        nbytes = sum(requested for _, requested in outputs)
        together = self.new(nbytes)
        for group, _ in outputs:
            drop_all(map(self.block, group))
        gradient = self.new(nbytes)
        together.drop()
        return [], held._replace(loss=self.intern(spots([gradient])))

    def recompute(self, held: _Held, size: int) -> tuple[list[Group], _Held]:
        """The second pass of a checkpoint."""
        graph = self._passes.graph(0, self._works[size])
        assert isinstance(graph, Placed)  # noqa: S101 - a device without limit is never full
        return [], held._replace(graph=graph)

    def backward(self, held: _Held, size: int, place: tuple[bool, int, bool]) -> tuple[list[Group], _Held]:
        """A backward pass.

        Args:
            held: what is held.
            size: samples of the micro-batch.
            place: whether it has no checkpoint, how many of the step came before it (2 stands for more), and whether
                it is the last.
        """
        is_open, before, last = place
        work = self._works[size]
        graph: Any = held.graph
        if is_open:
            assert held.stack is not None  # noqa: S101 - a forward pass left it
            graph = self._opened(work, held.stack[0])
            held = held._replace(stack=held.stack[1])
        self._passes.lasting.gradients = {0: []} if before else {}
        self._passes.lasting.alone = {0} if before == 1 and is_open else set()
        lent = self._lent(size, held, is_open=is_open, last=last)
        found = self._passes.backward(0, work, graph, lent, is_open=is_open)
        held = held._replace(graph=None)
        if not before:
            held = held._replace(gradients=self.intern(spots(self._passes.lasting.gradients[0])))
        returned = found if self._first else self._given(work.returning, self.returning_bytes(size), found)
        drop_all(lent.values())
        if is_open and not self._last and not self.watch.passed:
            self.send(SHARED, spots(self.allocator.take_deferred()))
        if self._last and last:
            if len(work.output_bytes) > 1:
                drop_all(map(self.block, held.loss or ()))
            held = held._replace(loss=None)
        if self._first:
            drop_all(returned.values())
            return [], held
        return self._send(returned, back=True), held

    def quick(self, number: int) -> int | None:
        """Run a pass of a checkpoint that does nothing but what it asks for and gives out."""
        if number not in self._quick:
            self._quick[number] = self._quick_pass(*self.calls[number])
        quick, pools = self._quick[number], self.pools
        if quick is None or pools is None:
            return None
        if quick.name == "recompute":
            made = self._graph = quick.make(pools)
            changes = made[0].changes, made[1].changes
            row = quick.rows.get(changes)
            if row is None:
                row = quick.rows[changes] = self.row_number(quick.used(pools, made))
            return row
        if quick.name == "forward":
            made = quick.make(pools)
        else:
            graph, self._graph = self._graph, None
            if graph is None:
                graph, self.held = self.held.graph.done, self.held._replace(graph=None)
            made = quick.make(pools, graph)
        key = id(made[0]), id(made[1])
        if key not in quick.out:
            quick.out[key] = made, self._out(quick, made)
        groups, row = quick.out[key][1]
        for queue, group in groups:
            self.queues[queue].append(group)
        if self._last and quick.name == "forward":
            where = quick.spots(made)
            entry = tuple(where.values()), sum(requested for _, _, requested in where.values())
            self.held = self.held._replace(outputs=self.push(entry, self.held.outputs))
        return row

    def _out(self, quick: QuickPass, made: tuple[Made, Made]) -> Out:
        back = quick.name == "backward"
        groups: list[tuple[int, Group]] = []
        if not (self._first if back else self._last):
            groups = [(queue, self.intern(group)) for queue, group in self.groups(quick.spots(made), back=back)]
        assert self.remembered is not None  # noqa: S101 - a quick pass ran
        used = quick.used(self.remembered, made)
        return Out(groups, self.row_number((*used, *self.sizes([group for _, group in groups]))))

    def settle(self) -> None:
        """Leave a graph to :attr:`held`."""
        if self._graph is not None:
            small, large = (Done(_NOTHING, made.blocks, (), made.extra) for made in self._graph)
            self.held, self._graph = self.held._replace(graph=Placed((small, large), 0, 0)), None

    def _quick_pass(self, name: str, arguments: tuple[Any, ...]) -> QuickPass | None:
        if name not in {"forward", "recompute", "backward"}:
            return None
        size = arguments[0]
        work = self._works[size]
        given = (work.leaving, self.leaving_bytes(size)) if name == "forward" else ((), ())
        if name == "backward":
            is_open, before, last = arguments[1]
            if is_open or not before or (self._last and last) or (self._first and own_names(work.returning)):
                return None
            given = ((), ()) if self._first else (work.returning, self.returning_bytes(size))
        program = self._passes.closed(work)[name]
        if sum(len(blocks) for blocks, _ in program.requests) > LONG:
            return None
        return QuickPass(name, program, *given)

    def _lent(self, size: int, held: _Held, *, is_open: bool, last: bool) -> dict[int, Block]:
        """What a backward pass lets go of; what was copied here is given back by that copy stream's states."""
        work, sizes = self._works[size], dict[int, int]()
        if is_open and not self._first:
            kept = self._passes.kept(work)
            inputs = {input_name(place): nbytes for place, nbytes in enumerate(self.returning_bytes(size))}
            sizes |= {name: nbytes for name, nbytes in inputs.items() if name in kept}
        if not self._last and (self._lends or not is_open):
            sizes |= {gradient_name(place): nbytes for place, nbytes in enumerate(self.leaving_bytes(size))}
        elsewhere = Tally(self.watch)
        lent = {name: elsewhere.alloc(nbytes, 0) for name, nbytes in sizes.items()}
        for name in lent.keys() & {*work.returning}:
            # It goes on as it is.
            lent[name].hold()
        if self._last and len(work.output_bytes) == 1:
            lent[gradient_name(0)] = self.block(held.loss[0]) if held.loss else elsewhere.alloc(0, 0)
            if not last:
                lent[gradient_name(0)].hold()
        return lent

    def _one_of(self, placed: Placed) -> Placed:
        """The one object for all graphs whose blocks are at the same places."""
        where = tuple(item for done in placed.done for item in done.blocks.items())
        return self._graphs.setdefault(where, placed)

    def _opened(self, work: TaskWork, placed: Placed) -> OpenGraph:
        graph = self._passes.opened(work, placed, self._passes.left(0, work, placed))
        if not self._last:
            for block in graph.shared.values():
                block.users = (_USER,)
        return graph

    def update(self, held: _Held) -> tuple[list[Group], _Held]:
        """The optimizer's update."""
        self._passes.lasting.has_state = held.state
        self._passes.lasting.update()
        return [], held._replace(state=True)

    def renew(self, held: _Held) -> tuple[list[Group], _Held]:
        """The optimizer's update, and the next step gives the gradients up."""
        _, held = self.update(held)
        drop_all(map(self.block, held.gradients or ()))
        return [], held._replace(gradients=None)
