"""Whose tensors live how long: the allocator's requests of a step, in the order of the host's calls.

A tensor lives while somebody holds it: the micro-batch on its way, a checkpoint that will recompute from it, a graph
that needs it for its backward pass. What copies read and write on other streams is recorded there
(:mod:`gpipe_bench.engine.transfer`), which delays its reuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from gpipe_bench.simulator.tracing.steps import NO_BLOCK
from gpipe_bench.simulator.workloads.workload import MemoryOp, TaskWork, Workload, gradient_name, input_name
from tests.simulator.oracle.allocator import Allocator, Block, Watch, drop_all
from tests.simulator.oracle.graph import Node
from tests.simulator.oracle.passes import Graph, Passes
from tests.simulator.oracle.places import Places
from tests.simulator.oracle.ways import passes_on

__all__ = ["Memory"]


_Key = tuple[int, int]


class Memory:
    """The memory of all devices during one or more steps.

    Args:
        workload: sizes.
        places: devices and streams.
        clock: for the allocators.
        capacity: bytes of each device; 0 for no limit.
        riding: whether skips ride through the partitions between.
        published: see :class:`tests.simulator.oracle.passes.Passes`.
        scheduled: whether a schedule runs all passes.

    Attributes:
        devices: an allocator each.
    """

    def __init__(
        self,
        workload: Workload,
        places: Places,
        clock: Watch,
        *,
        capacity: int,
        riding: bool,
        published: bool = False,
        scheduled: bool = False,
    ) -> None:
        self.devices = [Allocator(clock, capacity, device) for device in range(places.count)]
        self._flushes = [0] * places.count
        self._sent: list[Block] = []
        self._work = workload
        self._places = places
        self._riding, self._scheduled = riding, scheduled
        works = [work for works in workload.partitions for work in works.values()]
        # Every task runs backward, and sends gradients for all that enters.
        all_learn = all(work.learns and not work.returns for work in works)
        self._regular = all_learn and all(skip.returns for skip in workload.skips)
        self._skips = {skip.key: skip for skip in workload.skips}
        # Skips that a task of each partition takes in, and those that it stashes for another partition.
        self._incoming = [_incoming(workload, j, riding=riding) for j in range(workload.n)]
        crossing = [skip for skip in workload.skips if skip.source != skip.target]
        self._departing = [[skip for skip in crossing if skip.source == j] for j in range(workload.n)]
        self._ending = [[skip.key for skip in crossing if skip.target == j] for j in range(workload.n)]
        self._passes = Passes(workload, places, self.devices, published=published, scheduled=scheduled)
        # The caller holds the batch, of which micro-batches are views, all the time.
        inputs = zip(*(workload.task(i, 0).input_bytes for i in range(workload.m)), strict=True)
        self._batch = [self._passes.new(0, sum(nbytes)) for nbytes in inputs]
        self._reset()

    def _reset(self) -> None:
        """The batch is on the first device."""
        m = self._work.m
        self._values: list[list[Block]] = [[block.hold() for block in self._batch] for _ in range(m)]
        self._passing: list[dict[str, Block]] = [{} for _ in range(m)]
        self._saved: dict[_Key, list[Block]] = {}
        # Inputs of checkpoints by the task's names for them.
        self._named: dict[_Key, dict[int, Block]] = {}
        self._graphs: dict[_Key, Graph] = {}
        # Inputs that the graph of a task keeps, by the task's name for them.
        self._lent: dict[_Key, dict[int, Block]] = {}
        # Gradients that have come to (i, j): of its outputs, and of skips.
        self._gradients: dict[_Key, Sequence[Block | None]] = {}
        self._skip_gradients: dict[tuple[int, str], Block] = {}

    def flushed(self, device: int) -> bool:
        """Whether the allocator of ``device`` gave segments back since this was last asked."""
        before, self._flushes[device] = self._flushes[device], self.devices[device].flushes
        return self._flushes[device] > before

    # --- tasks ---------------------------------------------------------------------------------------------------

    def forward(self, node: Node, *, again: bool) -> None:
        """A forward pass is issued."""
        i, j = node.i, node.j
        work = self._work.task(i, j)
        if again:
            self._graphs[i, j] = self._passes.graph(j, work)
            if self._scheduled:
                # From now on its graph alone keeps the inputs that it needs.
                self._lend(node, work, self._named.pop((i, j)))
                drop_all(self._saved.pop((i, j)))
            return
        popped = {key: self._passing[i].pop(key) for key in self._incoming[j]}
        taken = [*self._values[i], *popped.values()]
        # A micro-batch holds them until the pass has ended, a checkpoint until its backward pass has.
        self._saved[i, j] = taken
        named: dict[int, Block] = {}
        if node.kind == "task" or self._scheduled or passes_on(work.leaving):
            inputs = [*self._values[i], *(popped[key] for key in self._ending[j])]
            named = {input_name(place): block for place, block in enumerate(inputs)}
        if node.kind == "task":
            if not node.single:
                self._lend(node, work, named)
            self._graphs[i, j], left = self._passes.open_graph(j, work)
        else:
            self._named[i, j] = named
            left = self._passes.plain(j, work)
        if passes_on(work.leaving):
            left |= {name: named[name].hold() for name in {*work.leaving} & named.keys()}
        size = self._work.microbatch_sizes[i]
        sizes = (*work.output_bytes, *(skip.bytes[size] for skip in self._departing[j]))
        given = self._given(j, work.leaving, sizes, left)
        split = len(work.output_bytes)
        self._values[i] = given[:split]
        self._passing[i].update(zip((skip.key for skip in self._departing[j]), given[split:], strict=True))
        for key, block in popped.items():
            if self._skips[key].target != j:
                self._passing[i][key] = block.hold()

    def _lend(self, node: Node, work: TaskWork, named: dict[int, Block]) -> None:
        """The graph of a task keeps some of its inputs."""
        kept = self._passes.kept(work)
        self._lent[node.i, node.j] = {name: block.hold() for name, block in named.items() if name in kept}

    def collected(self, node: Node) -> None:
        """The calling thread takes what a forward pass gave: its micro-batch holds that, and its inputs no more."""
        if not node.single:
            drop_all(self._saved.pop((node.i, node.j)))

    def backward(self, node: Node, kind: str) -> None:
        """A backward pass is issued, or a half of it."""
        i, j = node.i, node.j
        work, later = _part(self._work.task(i, j), kind)
        if work is None:
            return
        if kind == "backward_weights":
            self._weights(i, j, work)
            return
        departing = self._departing[j]
        is_open, lent = node.kind == "task" or self._scheduled, self._lent.pop((i, j), {})
        came: list[Block | None] = [*self._gradients.pop((i, j), ())]
        if departing:
            came += [self._skip_gradients.pop((i, skip.key), None) for skip in departing]
        is_known = not node.single or self._scheduled or passes_on(work.returning)
        # The gradients of several outputs of the last partition are one block for all.
        if is_known and len(came) == len(work.output_bytes) + len(departing):
            lent |= {gradient_name(place): block for place, block in enumerate(came) if block is not None}
            came = []
        passed_on = {name: lent[name].hold() for name in {*work.returning} & lent.keys()} if lent else lent
        options = {"is_open": is_open, "hands_over": self._hands_over(i, j)}
        found = self._passes.backward(j, work, self._graphs[i, j], lent, later=later, **options)
        if passed_on:
            found |= passed_on
        self._return(i, j, work, found)
        if later:
            # W needs the rest.
            gone = {op.block for op in work.backward_memory if op.kind == "free"} & lent.keys()
            drop_all(lent.pop(name) for name in gone)
            self._lent[i, j] = lent
            return
        del self._graphs[i, j]
        drop_all(self._saved.pop((i, j), ()))
        drop_all(lent.values())
        drop_all(block for block in came if block is not None)

    def _weights(self, i: int, j: int, work: TaskWork) -> None:
        """W is issued."""
        lent = self._lent.pop((i, j))
        self._passes.backward(j, work, self._graphs.pop((i, j)), lent, is_open=True, hands_over=self._hands_over(i, j))
        drop_all(lent.values())

    def _hands_over(self, i: int, j: int) -> bool:
        """Whether, with a schedule, a task gets the only reference to the gradient of its output."""
        return self._work.needing_gradients(j, self._work.microbatch_sizes[i]) == 1

    def _return(self, i: int, j: int, work: TaskWork, found: dict[int, Block]) -> None:
        """Gradients go to the partition before, and to where skips came from."""
        if not j:
            drop_all(found.values())
            return
        ending = self._ending[j]
        size = self._work.microbatch_sizes[i]
        sizes = (*work.input_bytes, *(self._skips[key].bytes[size] for key in ending))
        names, there = work.returning, None if self._regular else self._there(work, ending)
        if there is not None:
            # Of those that are not there, no name is that of a block.
            names, sizes = _those(names, there), _those(sizes, there)
        returned: Sequence[Block | None] = self._given(j, names, sizes, found)
        if there is not None:
            some = iter(returned)
            returned = [next(some) if is_there else None for is_there in there]
        self._gradients[i, j - 1] = returned[: len(work.input_bytes)]
        for key, block in zip(ending, returned[len(work.input_bytes) :], strict=True):
            if block is not None:
                self._skip_gradients[i, key] = block

    def _there(self, work: TaskWork, ending: Sequence[str]) -> list[bool]:
        """For each gradient that a task could send, whether there is one."""
        own = work.returns or (True,) * len(work.input_bytes)
        return [*own, *(self._skips[key].returns for key in ending)]

    def _given(self, j: int, names: Sequence[int], sizes: Sequence[int], found: dict[int, Block]) -> list[Block]:
        """A block for each of some tensors; ``found`` are held for the first that asks for them."""
        given: list[Block] = []
        for place, nbytes in enumerate(sizes):
            name = names[place] if names else NO_BLOCK
            if name in found:
                given.append(found[name].hold() if name in names[:place] else found[name])
            else:
                given.append(self._passes.new(j, nbytes))
        return given

    def loss(self) -> None:
        """The outputs are concatenated, and every micro-batch gets its share of the gradient."""
        last, m = self._work.n - 1, self._work.m
        outputs = [block for blocks in self._values for block in blocks]
        nbytes = sum(block.requested for block in outputs)
        # A single micro-batch is the output as it is.
        together = outputs if m == 1 else [self._passes.new(last, nbytes)]
        if m > 1:
            drop_all(outputs)
        # The loss keeps its input until its gradient is made.
        gradient = self._passes.new(last, nbytes)
        drop_all(together)
        gradient.holders = m
        self._gradients.update({(i, last): [gradient] for i in range(m)})

    def microbatch_loss(self, i: int) -> None:
        """The loss of a micro-batch has a gradient for each of its outputs, and lets go of these."""
        last = self._work.n - 1
        outputs, self._values[i] = self._values[i], []
        self._gradients[i, last] = [self._passes.new(last, block.requested) for block in outputs]
        drop_all(outputs)

    def update(self) -> None:
        """The optimizer changes the parameters; the first time it makes its state."""
        self._passes.lasting.update()

    def next_step(self) -> None:
        """The step is over, and the next batch comes in."""
        self._passes.lasting.next_step()
        self._reset()

    # --- copies --------------------------------------------------------------------------------------------------

    def transfer(self, node: Node, *, back: bool) -> None:
        """Tensors are copied: they are made on the receiver's copy stream, and used on streams of others."""
        places, i = self._places, node.i
        sender, receiver = (node.j, node.source) if back else (node.source, node.j)
        sending, receiving = (node.stream, node.peer) if back else (node.peer, node.stream)
        allocator = self.devices[places.devices[receiver]]
        made = [allocator.alloc(nbytes, receiving) for nbytes in (node.returned if back else node.nbytes)]
        sent = self._exchange(node, i, made, back=back)
        if sending != places.computing[sender]:
            for block in sent:
                block.owner.record_stream(block, sending)
        if receiving != places.computing[receiver]:
            for block in made:
                allocator.record_stream(block, places.computing[receiver])
        self._sent = sent

    def transferred(self) -> None:
        """The copy was issued: what was sent is held no longer by the micro-batch."""
        drop_all(self._sent)
        self._sent = []

    def _exchange(self, node: Node, i: int, made: list[Block], *, back: bool) -> list[Block]:
        """Put ``made`` where the tensors that they copy were; returns these."""
        if node.skip is not None:
            if back and not made:
                return []
            if back:
                sent = [self._skip_gradients.pop((i, node.skip))]
                self._skip_gradients[i, node.skip] = made[0]
            else:
                sent = [self._passing[i][node.skip]]
                self._passing[i][node.skip] = made[0]
            return sent
        riding = self._incoming[node.j] if self._riding else ()
        if back:
            new, came = iter(made), self._gradients[i, node.source]
            sent = [block for block in came if block is not None]
            self._gradients[i, node.source] = [None if block is None else next(new) for block in came]
            there = [key for key in riding if self._skips[key].returns]
            old = [self._skip_gradients[i, key] for key in there]
            self._skip_gradients.update({(i, key): next(new) for key in there})
        else:
            split = len(made) - len(riding)
            sent, self._values[i] = self._values[i], made[:split]
            old = [self._passing[i][key] for key in riding]
            self._passing[i].update({key: made[split + k] for k, key in enumerate(riding)})
        return sent + old


def _part(work: TaskWork, kind: str) -> tuple[TaskWork | None, Sequence[MemoryOp]]:
    """A task with the requests of a half of its backward pass alone, and those of the half that follows.

    Where the second half asks for nothing, or the task is not split, the first one does all.
    """
    split = work.split
    if kind == "backward" or (split is None and kind == "backward_inputs"):
        return work, ()
    if split is None or (kind == "backward_weights" and not split.weights_memory):
        return None, ()
    if kind == "backward_weights":
        return replace(work, backward_memory=split.weights_memory, returning=()), ()
    return replace(work, backward_memory=split.inputs_memory, returning=split.returning), split.weights_memory


def _those(values: Sequence[int], there: Sequence[bool]) -> tuple[int, ...]:
    return tuple(compress(values, there))


def _incoming(workload: Workload, j: int, *, riding: bool) -> list[str]:
    if riding:
        return [skip.key for skip in workload.skips if skip.source <= j - 1 < skip.target]
    return [skip.key for skip in workload.skips if skip.target == j != skip.source]
