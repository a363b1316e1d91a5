"""Whose tensors live how long: the allocator's requests of a step, in the order of the host's calls.

A tensor lives while somebody holds it: the micro-batch on its way, a checkpoint that will recompute from it, a graph
that needs it for its backward pass. What copies read and write on other streams is recorded there
(:mod:`gpipe_bench.engine.transfer`), which delays its reuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpipe_bench.simulator.allocator import Allocator, Block
from gpipe_bench.simulator.clock import Clock
from gpipe_bench.simulator.graph import Node
from gpipe_bench.simulator.places import Places
from gpipe_bench.simulator.workload import MemoryOp, Workload

__all__ = ["Memory"]


class _Tensor:
    """A block and how many hold it."""

    __slots__ = ("block", "device", "holders")

    def __init__(self, device: Allocator, block: Block, holders: int = 1) -> None:
        self.device = device
        self.block = block
        self.holders = holders

    def hold(self) -> _Tensor:
        self.holders += 1
        return self

    def drop(self) -> None:
        self.holders -= 1
        if not self.holders:
            self.device.free(self.block)


_Table = dict[int, _Tensor]
_Key = tuple[int, int]


def _drop(tensors: Iterable[_Tensor]) -> None:
    for tensor in tensors:
        tensor.drop()


class Memory:
    """The memory of all devices during one or more steps.

    Args:
        workload: sizes.
        places: devices and streams.
        clock: for the allocators.
        capacity: bytes of each device; 0 for no limit.
        riding: whether skips ride through the partitions between.

    Attributes:
        devices: an allocator each.
    """

    def __init__(self, workload: Workload, places: Places, clock: Clock, *, capacity: int, riding: bool) -> None:
        self.devices = [Allocator(clock, capacity, device) for device in range(places.count)]
        self._flushes = [0] * places.count
        self._sent: list[_Tensor] = []
        self._work = workload
        self._places = places
        self._riding = riding
        self._skips = {skip.key: skip for skip in workload.skips}
        # Skips that a task of each partition takes in, and those that it stashes for another partition.
        self._incoming = [_incoming(workload, j, riding=riding) for j in range(workload.n)]
        self._departing = [
            [skip for skip in workload.skips if skip.source == j != skip.target] for j in range(workload.n)
        ]
        for j, nbytes in enumerate(workload.static_bytes):
            if nbytes:
                self._new(j, nbytes, places.devices[j])
        # The caller holds the batch all the time.
        self._batch = [[self._new(0, nbytes) for nbytes in workload.task(i, 0).input_bytes] for i in range(workload.m)]
        self._reset()

    def _reset(self) -> None:
        """The batch is on the first device."""
        m = self._work.m
        self._values: list[list[_Tensor]] = [[tensor.hold() for tensor in tensors] for tensors in self._batch]
        self._passing: list[dict[str, _Tensor]] = [{} for _ in range(m)]
        self._saved: dict[_Key, list[_Tensor]] = {}
        self._graphs: dict[_Key, _Table] = {}
        # Gradients that have come to (i, j): of its outputs, and of skips.
        self._gradients: dict[_Key, list[_Tensor]] = {}
        self._skip_gradients: dict[tuple[int, str], _Tensor] = {}

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
            self._graphs[i, j] = self._run(j, work.graph_memory, {})
            return
        incoming = self._incoming[j]
        arrived = [*self._values[i], *(self._passing[i].pop(key) for key in incoming)]
        passing = {key: arrived[len(self._values[i]) + k] for k, key in enumerate(incoming)}
        self._saved[i, j] = arrived
        plain = node.kind == "task"
        table = self._run(j, work.graph_memory if plain else work.forward_memory, {})
        departing = self._departing[j]
        if work.leaving:
            left = [table[block] if plain else table.pop(block) for block in work.leaving]
            left = [tensor.hold() for tensor in left] if plain else left
        else:
            size = self._work.microbatch_sizes[i]
            left = [self._new(j, nbytes) for nbytes in (*work.output_bytes, *(skip.bytes[size] for skip in departing))]
        if plain:
            self._graphs[i, j] = table
        else:
            _drop(table.values())
        split = len(left) - len(departing)
        self._values[i] = left[:split]
        stashed = dict(zip((skip.key for skip in departing), left[split:], strict=True))
        for key, tensor in passing.items():
            if self._skips[key].target != j:
                stashed[key] = tensor.hold()
        self._passing[i].update(stashed)

    def backward(self, node: Node) -> None:
        """A backward pass is issued."""
        i, j = node.i, node.j
        work = self._work.task(i, j)
        table = self._run(j, work.backward_memory, self._graphs.pop((i, j), {}))
        returned = [table.pop(block) for block in work.returning]
        incoming = self._incoming[j]
        ending = [key for key in incoming if self._skips[key].target == j]
        if not work.returning and j:
            size = self._work.microbatch_sizes[i]
            sizes = (*work.input_bytes, *(self._skips[key].bytes[size] for key in ending))
            returned = [self._new(j, nbytes) for nbytes in sizes]
        _drop(table.values())
        _drop(self._saved.pop((i, j)))
        _drop(self._gradients.pop((i, j), ()))
        for skip in self._departing[j]:
            if (i, skip.key) in self._skip_gradients:
                self._skip_gradients.pop((i, skip.key)).drop()
        split = len(returned) - len(ending)
        self._skip_gradients.update({(i, key): tensor for key, tensor in zip(ending, returned[split:], strict=True)})
        if j:
            self._gradients[i, j - 1] = returned[:split]
        else:
            _drop(returned)

    def loss(self) -> None:
        """The outputs are concatenated, and every micro-batch gets its share of the gradient."""
        last, m = self._work.n - 1, self._work.m
        nbytes = sum(tensor.block.requested for tensors in self._values for tensor in tensors)
        together = self._new(last, nbytes)
        gradient = self._new(last, nbytes)
        for tensors in self._values:
            _drop(tensors)
        together.drop()
        gradient.holders = m
        self._gradients.update({(i, last): [gradient] for i in range(m)})

    def next_step(self) -> None:
        """The step is over, and the next batch comes in."""
        self._reset()

    # --- copies --------------------------------------------------------------------------------------------------

    def transfer(self, node: Node, *, back: bool) -> None:
        """Tensors are copied: they are made on the receiver's copy stream, and used on streams of others."""
        places, i = self._places, node.i
        sender, receiver = (node.j, node.source) if back else (node.source, node.j)
        sending, receiving = (node.stream, node.peer) if back else (node.peer, node.stream)
        allocator = self.devices[places.devices[receiver]]
        made = [_Tensor(allocator, allocator.alloc(nbytes, receiving)) for nbytes in node.nbytes]
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
        _drop(self._sent)
        self._sent = []

    def _exchange(self, node: Node, i: int, made: list[_Tensor], *, back: bool) -> list[_Tensor]:
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

    # --- helpers -------------------------------------------------------------------------------------------------

    def _new(self, j: int, nbytes: int, stream: int | None = None) -> _Tensor:
        allocator = self.devices[self._places.devices[j]]
        return _Tensor(allocator, allocator.alloc(nbytes, self._places.computing[j] if stream is None else stream))

    def _run(self, j: int, operations: Sequence[MemoryOp], table: _Table) -> _Table:
        """Carry out a task's own requests on ``table``."""
        allocator, stream = self.devices[self._places.devices[j]], self._places.computing[j]
        for operation in operations:
            if operation.kind == "alloc":
                table[operation.block] = _Tensor(allocator, allocator.alloc(operation.bytes, stream))
            else:
                table.pop(operation.block).drop()
        return table


def _incoming(workload: Workload, j: int, *, riding: bool) -> list[str]:
    if riding:
        return [skip.key for skip in workload.skips if skip.source <= j - 1 < skip.target]
    return [skip.key for skip in workload.skips if skip.target == j != skip.source]
