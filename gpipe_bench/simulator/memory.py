"""Whose tensors live how long: the allocator's requests of a step, in the order of the host's calls.

A tensor lives while somebody holds it: the micro-batch on its way, a checkpoint that will recompute from it, a graph
that needs it for its backward pass. What copies read and write on other streams is recorded there
(:mod:`gpipe_bench.engine.transfer`), which delays its reuse.
"""

from __future__ import annotations

from gpipe_bench.simulator.allocator import Allocator, Block
from gpipe_bench.simulator.clock import Clock
from gpipe_bench.simulator.graph import Node
from gpipe_bench.simulator.passes import Graph, Passes, drop_all
from gpipe_bench.simulator.places import Places
from gpipe_bench.simulator.tally import Tally
from gpipe_bench.simulator.workload import Workload

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
        tally: whether to count the bytes of tensors only.

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
        tally: bool = False,
    ) -> None:
        allocator = Tally if tally else Allocator
        self.devices = [allocator(clock, capacity, device) for device in range(places.count)]
        self._flushes = [0] * places.count
        self._sent: list[Block] = []
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
        self._values: list[list[Block]] = [[block.hold() for block in self._batch] for _ in range(m)]
        self._passing: list[dict[str, Block]] = [{} for _ in range(m)]
        self._saved: dict[_Key, list[Block]] = {}
        self._graphs: dict[_Key, Graph] = {}
        # Gradients that have come to (i, j): of its outputs, and of skips.
        self._gradients: dict[_Key, list[Block]] = {}
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
            return
        incoming, departing = self._incoming[j], self._departing[j]
        popped = {key: self._passing[i].pop(key) for key in incoming}
        self._saved[i, j] = [*self._values[i], *popped.values()]
        if node.kind == "task":
            self._graphs[i, j], shared = self._passes.open_graph(j, work)
            left = [block.hold() for block in shared]
        else:
            left = self._passes.plain(j, work)
        if not work.leaving:
            size = self._work.microbatch_sizes[i]
            sizes = (*work.output_bytes, *(skip.bytes[size] for skip in departing))
            left = [self._passes.new(j, nbytes) for nbytes in sizes]
        split = len(left) - len(departing)
        self._values[i] = left[:split]
        if departing:
            self._passing[i].update({skip.key: block for skip, block in zip(departing, left[split:], strict=True)})
        for key, block in popped.items():
            if self._skips[key].target != j:
                self._passing[i][key] = block.hold()

    def backward(self, node: Node) -> None:
        """A backward pass is issued."""
        i, j = node.i, node.j
        work = self._work.task(i, j)
        returned = self._passes.backward(j, work, self._graphs.pop((i, j)))
        ending = [key for key in self._incoming[j] if self._skips[key].target == j]
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
        for key, block in zip(ending, returned[split:], strict=True):
            self._skip_gradients[i, key] = block
        if j:
            self._gradients[i, j - 1] = returned[:split]
        else:
            drop_all(returned)

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
        made = [allocator.alloc(nbytes, receiving) for nbytes in node.nbytes]
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
