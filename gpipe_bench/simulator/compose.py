"""Puts traces of layers together to the work of a partition: kernels in a row, blocks that layers share.

A storage that leaves a layer is the next one's input: one block with several holders (the value between two layers, the
graphs of the layers that kept it), which is free when the last one lets go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpipe_bench.simulator.cost import scratch_bytes, total
from gpipe_bench.simulator.facts import LayerFacts
from gpipe_bench.simulator.hardware import Profile
from gpipe_bench.simulator.steps import NO_BLOCK, Alloc, Free, Kernel, LayerTrace, Port, Step
from gpipe_bench.simulator.workload import Kernels, MemoryOp, TaskWork, gradient_name, input_name

__all__ = ["Costs", "PartitionWork", "compose"]


@dataclass(slots=True)
class _Blocks:
    """Blocks of a task with their holders; what came from outside is negative, and never allocated here."""

    costs: Costs
    ops: list[MemoryOp] = field(default_factory=list)
    holders: Counter[int] = field(default_factory=Counter)
    count: int = 0

    def leave(self, blocks: Iterable[int]) -> None:
        """Whoever holds them from now on is no affair of the task."""
        self.holders.subtract(blocks)

    def alloc(self, nbytes: int) -> int:
        block = self.count
        self.count += 1
        self.ops.append(MemoryOp("alloc", block, nbytes))
        self.holders[block] += 1
        return block

    def hold(self, block: int) -> None:
        self.holders[block] += 1

    def drop(self, block: int, kind: Literal["free", "gradient", "view"] = "free") -> None:
        self.holders[block] -= 1
        if not self.holders[block] and block != NO_BLOCK:
            self.ops.append(MemoryOp(kind if block >= 0 else "free", block))

    def run(self, steps: Sequence[Step], names: dict[int, int]) -> None:
        """The steps of a layer, whose blocks are called ``names`` in the partition."""
        for step in steps:
            if isinstance(step, Alloc):
                names[step.block] = self.alloc(step.bytes)
            elif isinstance(step, Free):
                if step.block in names:
                    kind: Literal["gradient", "view"] = "view" if step.view else "gradient"
                    self.drop(names.pop(step.block), kind if step.gradient else "free")
            else:
                scratch = self.costs.scratch(step)
                if scratch is not None:
                    self.ops.append(scratch)

    def take(self) -> tuple[MemoryOp, ...]:
        ops, self.ops = tuple(self.ops), []
        return ops


class Costs:
    """Durations of layers on one device; layers of one kind share theirs.

    Args:
        profile: the device.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        # The layers are kept: an id may only be used again when its object is gone.
        self._known: dict[tuple[int, str], tuple[Kernels, LayerTrace]] = {}
        # Kernels with scratch memory, numbered.
        self._scratches: dict[Kernel, MemoryOp | None] = {}

    def scratch(self, kernel: Kernel) -> MemoryOp | None:
        """The scratch memory that a kernel asks for, if any."""
        if kernel not in self._scratches:
            nbytes = scratch_bytes(kernel, self.profile)
            number = len(self._scratches)
            self._scratches[kernel] = MemoryOp("scratch", number, nbytes) if nbytes else None
        return self._scratches[kernel]

    def of(self, layer: LayerTrace, direction: str) -> Kernels:
        """One pass of a layer: ``forward``, ``plain`` or ``backward``."""
        key = id(layer), direction
        if key not in self._known:
            self._known[key] = total(layer.kernels(direction), self.profile), layer
        return self._known[key][0]


@dataclass(frozen=True, slots=True)
class PartitionWork:
    """The work of a partition, and the skips that cross its borders.

    Attributes:
        task: the work.
        departing: skip number -> bytes.
        returning: numbers of the skips that arrive for which gradients go back.
    """

    task: TaskWork
    departing: dict[int, int]
    returning: frozenset[int]


class _Partition:
    """Layers in a row, and the skips that come to them and go from them.

    Args:
        layers: trace of each layer.
        facts: of each layer.
        inputs: how many tensors enter, skips aside.
        arriving: numbers of the skips that come from other partitions.
        departing: numbers of the skips that go to others.
    """

    def __init__(
        self,
        layers: Sequence[LayerTrace],
        facts: Sequence[LayerFacts],
        *,
        inputs: int,
        arriving: Sequence[int],
        departing: Sequence[int],
    ) -> None:
        self.layers, self.facts, self.inputs, self.departing = layers, facts, inputs, list(departing)
        self.arriving = {number: input_name(inputs + place) for place, number in enumerate(arriving)}
        self.skip_bytes: dict[int, int] = {}

    def forward(self, blocks: _Blocks, *, graph: bool) -> tuple[list[Port], list[int], list[dict[int, int]]]:
        """Run the layers; gives outputs, block of each departing skip, and the names that the graph keeps."""
        values = [Port(input_name(place), 0) for place in range(self.inputs)]
        entered = [*(port.block for port in values), *self.arriving.values()]
        # The micro-batch holds them until the pass has ended, and the first layer that takes them.
        for block in (*entered, *entered):
            blocks.hold(block)
        skips = {number: Port(block, 0) for number, block in self.arriving.items()}
        graphs: list[dict[int, int]] = []
        for layer, facts in zip(self.layers, self.facts, strict=True):
            incoming = [*values, *(skips.pop(facts.pops[index]) for index in layer.popped)]
            leaving, kept = _forward(blocks, layer, [port.block for port in incoming], graph=graph)
            graphs.append(kept)
            split = len(leaving) - len(layer.stashed)
            values = leaving[:split]
            skips |= {facts.stashes[index]: port for index, port in zip(layer.stashed, leaving[split:], strict=True)}
        self.skip_bytes = {number: skips[number].bytes for number in self.departing if number in skips}
        departed = [skips[number].block for number in self.skip_bytes]
        blocks.leave([*entered, *(port.block for port in values), *departed])
        return values, departed, graphs

    def backward(self, blocks: _Blocks, graphs: list[dict[int, int]]) -> tuple[list[int], dict[int, int]]:
        """Run the layers' backward passes; gives blocks of the gradients of inputs and of skips that arrived."""
        last = self.layers[-1]
        outputs = len(last.outputs) - len(last.stashed)
        values = [gradient_name(place) for place in range(outputs)]
        skips = {number: gradient_name(outputs + place) for place, number in enumerate(self.skip_bytes)}
        for block in (*values, *skips.values()):
            blocks.hold(block)
        for layer, facts, kept in reversed(list(zip(self.layers, self.facts, graphs, strict=True))):
            stashed = [facts.stashes[index] for index in layer.stashed]
            gradients = [*values, *(skips.pop(number, NO_BLOCK) for number in stashed)]
            arrived = _backward(blocks, layer, dict(kept), gradients)
            split = layer.inputs - len(layer.popped)
            values = arrived[:split]
            skips |= {facts.pops[index]: block for index, block in zip(layer.popped, arrived[split:], strict=True)}
        return values, skips


def _forward(
    blocks: _Blocks, layer: LayerTrace, incoming: Sequence[int], *, graph: bool
) -> tuple[list[Port], dict[int, int]]:
    """Run a layer; gives what leaves it, and the names that its graph keeps."""
    names = dict(enumerate(incoming))
    steps, ports = (layer.forward, layer.outputs) if graph else (layer.plain, layer.plain_outputs)
    blocks.run([step for step in steps if not _frees_input(step, layer)], names)
    leaving = [Port(names.get(port.block, NO_BLOCK), port.bytes) for port in ports]
    kept = {block: names[block] for block in layer.kept if block in names} if graph else {}
    for block in (*(port.block for port in leaving), *kept.values()):
        blocks.hold(block)
    # The layer itself, and whoever called it, let go.
    own = [name for block, name in names.items() if block >= layer.inputs]
    for block in (*own, *incoming):
        blocks.drop(block)
    return leaving, kept


def _backward(blocks: _Blocks, layer: LayerTrace, names: dict[int, int], gradients: Sequence[int]) -> list[int]:
    """Run a layer's backward pass on the ``gradients`` of its outputs; gives those of its inputs."""
    for block, gradient in zip(layer.output_gradients, gradients, strict=True):
        if block != NO_BLOCK:
            names[block] = gradient
        elif gradient != NO_BLOCK:
            blocks.drop(gradient)
    blocks.run(layer.backward, names)
    arrived = [names.get(block, NO_BLOCK) for block in layer.input_gradients]
    # One gradient may be that of several inputs, as of both operands of a sum.
    for block in arrived:
        blocks.hold(block)
    for name in names.values():
        blocks.drop(name)
    return arrived


def compose(
    layers: Sequence[LayerTrace],
    facts: Sequence[LayerFacts],
    *,
    input_bytes: Sequence[int],
    arriving: Sequence[int],
    departing: Sequence[int],
    first: bool,
    costs: Costs,
) -> PartitionWork:
    """The work of a partition for micro-batches of one size.

    Args:
        layers: trace of each layer.
        facts: of each layer.
        input_bytes: of the tensors that enter, skips aside.
        arriving: numbers of the skips that come from other partitions.
        departing: numbers of the skips that go to others.
        first: whether the partition is the first one, whose inputs need no gradient.
        costs: of the layers on the device.
    """
    partition = _Partition(layers, facts, inputs=len(input_bytes), arriving=arriving, departing=departing)
    plain = _Blocks(costs)
    plain_values, plain_skips, _ = partition.forward(plain, graph=False)
    graph = _Blocks(costs)
    values, skips, graphs = partition.forward(graph, graph=True)
    leaving = [*(port.block for port in values), *skips]
    renamed = _one_to_one([*(port.block for port in plain_values), *plain_skips], leaving)
    graph_memory = graph.take()
    gradients, skip_gradients = partition.backward(graph, graphs)
    task = TaskWork(
        forward=_duration(layers, "plain", costs),
        recompute=_duration(layers, "forward", costs),
        backward=_duration(layers, "backward", costs),
        forward_memory=_renamed(plain.take(), renamed or {}, graph.count),
        graph_memory=graph_memory,
        backward_memory=graph.take(),
        output_bytes=tuple(port.bytes for port in values),
        input_bytes=tuple(input_bytes),
        leaving=() if renamed is None else _some(leaving),
        returning=() if first else _some([*gradients, *(skip_gradients.get(number, NO_BLOCK) for number in arriving)]),
        nodes=sum(layer.nodes for layer in layers),
        learns=_learns(layers, facts),
        returns=() if first or NO_BLOCK not in gradients else tuple(block != NO_BLOCK for block in gradients),
    )
    returning = frozenset(number for number in arriving if skip_gradients.get(number, NO_BLOCK) != NO_BLOCK)
    return PartitionWork(task, partition.skip_bytes, returning)


def _learns(layers: Sequence[LayerTrace], facts: Sequence[LayerFacts]) -> bool:
    """Whether any parameter is trained, or an input needs a gradient, so that it goes through some layer."""
    return any(layer.parameters for layer in facts) or any(set(layer.output_gradients) - {NO_BLOCK} for layer in layers)


def _frees_input(step: Step, layer: LayerTrace) -> bool:
    return isinstance(step, Free) and step.block < layer.inputs


def _some(blocks: Sequence[int]) -> tuple[int, ...]:
    """Blocks, or nothing if there is none."""
    return tuple(blocks) if set(blocks) != {NO_BLOCK} else ()


def _one_to_one(plain: Sequence[int], leaving: Sequence[int]) -> dict[int, int] | None:
    """From what leaves the pass without graph to what leaves that with graph; None if they differ in kind."""
    pairs = set(zip(plain, leaving, strict=True))
    names = {block for block, _ in pairs}
    if not len(pairs) == len(names) == len({name for _, name in pairs}):
        return None
    if any(block != name for block, name in pairs if min(block, name) < 0):
        return None
    return dict(pairs)


def _renamed(ops: Sequence[MemoryOp], names: dict[int, int], first_free: int) -> tuple[MemoryOp, ...]:
    """The operations with outputs called as in the pass with graph, and everything else out of their way."""
    return tuple(
        op if op.kind == "scratch" else MemoryOp(op.kind, names.get(op.block, first_free + op.block), op.bytes)
        for op in ops
    )


def _duration(layers: Sequence[LayerTrace], direction: str, costs: Costs) -> Kernels:
    works = [costs.of(layer, direction) for layer in layers]
    return Kernels(sum(work.duration_ns for work in works), sum(work.launches for work in works))
