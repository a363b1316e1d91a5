"""Whose tensors live how long: the allocator's requests of a step, in the order of the host's calls.

A tensor lives while somebody holds it: the micro-batch on its way, a checkpoint that will recompute from it, a graph
that needs it for its backward pass. What copies read and write on other streams is recorded there
(:mod:`gpipe_bench.engine.transfer`), which delays its reuse.
"""

from __future__ import annotations

from gpipe_bench.simulator.allocator import Allocator
from gpipe_bench.simulator.clock import Clock
from gpipe_bench.simulator.graph import Node
from gpipe_bench.simulator.passes import Passes, Table, Tensor, drop_all
from gpipe_bench.simulator.places import Places
from gpipe_bench.simulator.programs import Placed
from gpipe_bench.simulator.workload import TaskWork, Workload

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
        keeps_gradients: whether gradients are set to zero between steps, rather than given up.

    Attributes:
        devices: an allocator each.
    """

    def __init__(
        self,
        workload: Workload,
        places: Places,
        clock: Clock,
        *,
        capacity: int,
        riding: bool,
        keeps_gradients: bool = False,
    ) -> None:
        self.devices = [Allocator(clock, capacity, device) for device in range(places.count)]
        self._flushes = [0] * places.count
        self._sent: list[Tensor] = []
        self._work = workload
        self._places = places
        self._riding = riding
        self._skips = {skip.key: skip for skip in workload.skips}
        # Skips that a task of each partition takes in, and those that it stashes for another partition.
        self._incoming = [_incoming(workload, j, riding=riding) for j in range(workload.n)]
        self._departing = [
            [skip for skip in workload.skips if skip.source == j != skip.target] for j in range(workload.n)
        ]
        self._passes = Passes(workload, places, self.devices, keeps_gradients=keeps_gradients)
        # The caller holds the batch, of which micro-batches are views, all the time.
        inputs = zip(*(workload.task(i, 0).input_bytes for i in range(workload.m)), strict=True)
        self._batch = [self._passes.new(0, sum(nbytes)) for nbytes in inputs]
        self._reset()

    def _reset(self) -> None:
        """The batch is on the first device."""
        m = self._work.m
        self._values: list[list[Tensor]] = [[tensor.hold() for tensor in self._batch] for _ in range(m)]
        self._passing: list[dict[str, Tensor]] = [{} for _ in range(m)]
        self._saved: dict[_Key, list[Tensor]] = {}
        self._graphs: dict[_Key, Placed | Table] = {}
        # Gradients that have come to (i, j): of its outputs, and of skips.
        self._gradients: dict[_Key, list[Tensor]] = {}
        self._skip_gradients: dict[tuple[int, str], Tensor] = {}

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
            self._graphs[i, j] = self._passes.remembered(j, work, "graph", None)
            return
        incoming = self._incoming[j]
        arrived = [*self._values[i], *(self._passing[i].pop(key) for key in incoming)]
        passing = {key: arrived[len(self._values[i]) + k] for k, key in enumerate(incoming)}
        self._saved[i, j] = arrived
        departing = self._departing[j]
        left = self._leave(i, j, work, plain=node.kind == "task")
        if not work.leaving:
            size = self._work.microbatch_sizes[i]
            left = [
                self._passes.new(j, nbytes)
                for nbytes in (*work.output_bytes, *(skip.bytes[size] for skip in departing))
            ]
        split = len(left) - len(departing)
        self._values[i] = left[:split]
        stashed = dict(zip((skip.key for skip in departing), left[split:], strict=True))
        for key, tensor in passing.items():
            if self._skips[key].target != j:
                stashed[key] = tensor.hold()
        self._passing[i].update(stashed)

    def _leave(self, i: int, j: int, work: TaskWork, *, plain: bool) -> list[Tensor]:
        """Run a first pass; gives the tensors that leave."""
        if plain:
            table = self._passes.run(j, work, "graph", {})
            self._graphs[i, j] = table
            return [table[block].hold() for block in work.leaving]
        table = self._passes.as_table(j, work, "plain", self._passes.remembered(j, work, "plain", None))
        return [table[block] for block in work.leaving]

    def backward(self, node: Node) -> None:
        """A backward pass is issued."""
        i, j = node.i, node.j
        work = self._work.task(i, j)
        graph = self._graphs.pop((i, j), {})
        table = self._passes.backward(j, work, graph)
        returned = [table[block] for block in work.returning]
        incoming = self._incoming[j]
        ending = [key for key in incoming if self._skips[key].target == j]
        if not work.returning and j:
            size = self._work.microbatch_sizes[i]
            sizes = (*work.input_bytes, *(self._skips[key].bytes[size] for key in ending))
            returned = [self._passes.new(j, nbytes) for nbytes in sizes]
        drop_all(self._saved.pop((i, j)))
        drop_all(self._gradients.pop((i, j), ()))
        for skip in self._departing[j]:
            if (i, skip.key) in self._skip_gradients:
                self._skip_gradients.pop((i, skip.key)).drop()
        split = len(returned) - len(ending)
        self._skip_gradients.update({(i, key): tensor for key, tensor in zip(ending, returned[split:], strict=True)})
        if j:
            self._gradients[i, j - 1] = returned[:split]
        else:
            drop_all(returned)

    def loss(self) -> None:
        """The outputs are concatenated, and every micro-batch gets its share of the gradient."""
        last, m = self._work.n - 1, self._work.m
        outputs = [tensor for tensors in self._values for tensor in tensors]
        nbytes = sum(tensor.block.requested for tensor in outputs)
        # A single micro-batch is the output as it is.
        together = outputs if m == 1 else [self._passes.new(last, nbytes)]
        if m > 1:
            drop_all(outputs)
        # The loss keeps its input until its gradient is made.
        gradient = self._passes.new(last, nbytes)
        drop_all(together)
        gradient.holders = m
        self._gradients.update({(i, last): [gradient] for i in range(m)})

    def update(self) -> None:
        """The optimizer changes the parameters; the first time it makes its state."""
        self._passes.update()

    def next_step(self) -> None:
        """The step is over, and the next batch comes in."""
        self._passes.next_step()
        self._reset()

    # --- copies --------------------------------------------------------------------------------------------------

    def transfer(self, node: Node, *, back: bool) -> None:
        """Tensors are copied: they are made on the receiver's copy stream, and used on streams of others."""
        places, i = self._places, node.i
        sender, receiver = (node.j, node.source) if back else (node.source, node.j)
        sending, receiving = (node.stream, node.peer) if back else (node.peer, node.stream)
        allocator = self.devices[places.devices[receiver]]
        made = [Tensor(allocator, allocator.alloc(nbytes, receiving)) for nbytes in node.nbytes]
        sent = self._exchange(node, i, made, back=back)
        for tensor in sent:
            if sending != places.computing[sender]:
                tensor.device.record_stream(tensor.block, sending)
        for tensor in made:
            if receiving != places.computing[receiver]:
                allocator.record_stream(tensor.block, places.computing[receiver])
        self._sent = sent

    def transferred(self) -> None:
        """The copy was issued: what was sent is held no longer by the micro-batch."""
        drop_all(self._sent)
        self._sent = []

    def _exchange(self, node: Node, i: int, made: list[Tensor], *, back: bool) -> list[Tensor]:
        """Put ``made`` where the tensors that they copy were; returns these."""
        if node.skip is not None:
            if back:
                sent = [self._skip_gradients.pop((i, node.skip))]
                self._skip_gradients[i, node.skip] = made[0]
            else:
                sent = [self._passing[i][node.skip]]
                self._passing[i][node.skip] = made[0]
            return sent
        riding = self._incoming[node.j] if self._riding else ()
        split = len(made) - len(riding)
        if back:
            sent = self._gradients[i, node.source]
            self._gradients[i, node.source] = made[:split]
            old = [self._skip_gradients[i, key] for key in riding]
            self._skip_gradients.update({(i, key): made[split + k] for k, key in enumerate(riding)})
        else:
            sent, self._values[i] = self._values[i], made[:split]
            old = [self._passing[i][key] for key in riding]
            self._passing[i].update({key: made[split + k] for k, key in enumerate(riding)})
        return sent + old


def _incoming(workload: Workload, j: int, *, riding: bool) -> list[str]:
    if riding:
        return [skip.key for skip in workload.skips if skip.source <= j - 1 < skip.target]
    return [skip.key for skip in workload.skips if skip.target == j != skip.source]
