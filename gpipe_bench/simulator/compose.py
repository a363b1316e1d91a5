"""Puts traces of layers together to the work of a partition: kernels in a row, blocks that layers share.

A storage that leaves a layer is the next one's input: one block with several holders (the value between two layers, the
graphs of the layers that kept it), which is free when the last one lets go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpipe_bench.simulator.cost import scratch_bytes, total
from gpipe_bench.simulator.facts import LayerFacts
from gpipe_bench.simulator.hardware import Profile
from gpipe_bench.simulator.steps import NO_BLOCK, Alloc, Free, Kernel, LayerTrace, Port, Step
from gpipe_bench.simulator.workload import Kernels, MemoryOp, TaskWork

__all__ = ["Costs", "PartitionWork", "compose"]


@dataclass(slots=True)
class _Blocks:
    """Blocks of a task with their holders; blocks from outside are negative, and never allocated or freed here."""

    costs: Costs
    ops: list[MemoryOp] = field(default_factory=list)
    holders: Counter[int] = field(default_factory=Counter)
    count: int = 0
    outside: int = 0

    def enter(self) -> int:
        self.outside -= 1
        return self.outside - 1

    def alloc(self, nbytes: int) -> int:
        block = self.count
        self.count += 1
        self.ops.append(MemoryOp("alloc", block, nbytes))
        self.holders[block] += 1
        return block

    def hold(self, block: int) -> None:
        self.holders[block] += 1

    def drop(self, block: int, kind: Literal["free", "gradient"] = "free") -> None:
        self.holders[block] -= 1
        if not self.holders[block]:
            del self.holders[block]
            if block >= 0:
                self.ops.append(MemoryOp(kind, block))

    def run(self, steps: Sequence[Step], names: dict[int, int]) -> None:
        """The steps of a layer, whose blocks are called ``names`` in the partition."""
        for step in steps:
            if isinstance(step, Alloc):
                names[step.block] = self.alloc(step.bytes)
            elif isinstance(step, Free):
                if step.block in names:
                    self.drop(names.pop(step.block), "gradient" if step.gradient else "free")
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
    """

    task: TaskWork
    departing: dict[int, int]


class _Partition:
    def __init__(
        self, layers: Sequence[LayerTrace], facts: Sequence[LayerFacts], inputs: int, departing: Sequence[int]
    ) -> None:
        self.layers, self.facts, self.inputs, self.departing = layers, facts, inputs, list(departing)
        self.skip_bytes: dict[int, int] = {}

    def forward(self, blocks: _Blocks, *, graph: bool) -> tuple[list[Port], list[int], list[dict[int, int]]]:
        """Run the layers; gives outputs, block of each departing skip, and the names that the graph keeps."""
        values = [Port(blocks.enter(), 0) for _ in range(self.inputs)]
        for port in values:
            blocks.hold(port.block)
        skips: dict[int, Port] = {}
        graphs: list[dict[int, int]] = []
        for layer, facts in zip(self.layers, self.facts, strict=True):
            popped = [facts.pops[index] for index in layer.popped]
            incoming = [*values, *(skips.pop(number) if number in skips else self._arrive(blocks) for number in popped)]
            names = {index: port.block for index, port in enumerate(incoming)}
            ports = layer.outputs if graph else layer.plain_outputs
            steps = layer.forward if graph else layer.plain
            blocks.run([step for step in steps if not _frees_input(step, layer)], names)
            leaving = [Port(names.get(port.block, NO_BLOCK), port.bytes) for port in ports]
            kept = {block: names[block] for block in layer.kept if block in names} if graph else {}
            for block in (*(port.block for port in leaving), *kept.values()):
                blocks.hold(block)
            # The layer itself, and whoever called it, let go.
            own = [name for block, name in names.items() if block >= layer.inputs]
            for block in (*own, *(port.block for port in incoming)):
                blocks.drop(block)
            graphs.append(kept)
            split = len(leaving) - len(layer.stashed)
            values = leaving[:split]
            skips |= {facts.stashes[index]: port for index, port in zip(layer.stashed, leaving[split:], strict=True)}
        self.skip_bytes = {number: skips[number].bytes for number in self.departing if number in skips}
        return values, [skips[number].block for number in self.skip_bytes], graphs

    def _arrive(self, blocks: _Blocks) -> Port:
        block = blocks.enter()
        blocks.hold(block)
        return Port(block, 0)

    def backward(self, blocks: _Blocks, graphs: list[dict[int, int]]) -> tuple[list[int], dict[int, int]]:
        """Run the layers' backward passes; gives blocks of the gradients of inputs and of skips that arrived."""
        last = self.layers[-1]
        values = [blocks.enter() for _ in range(len(last.outputs) - len(last.stashed))]
        for block in values:
            blocks.hold(block)
        skips: dict[int, int] = {}
        for layer, facts, kept in reversed(list(zip(self.layers, self.facts, graphs, strict=True))):
            stashed = [facts.stashes[index] for index in layer.stashed]
            gradients = [
                *values,
                *(skips.pop(number) if number in skips else self._arrive(blocks).block for number in stashed),
            ]
            names = dict(kept)
            for block, gradient in zip(layer.output_gradients, gradients, strict=True):
                if block == NO_BLOCK and gradient != NO_BLOCK:
                    blocks.drop(gradient)
                elif block != NO_BLOCK:
                    names[block] = gradient
            blocks.run(layer.backward, names)
            split = layer.inputs - len(layer.popped)
            arrived = [names.get(block, NO_BLOCK) for block in layer.input_gradients]
            # One gradient may be that of several inputs, as of both operands of a sum.
            for block in arrived:
                blocks.hold(block)
            for name in names.values():
                blocks.drop(name)
            values = arrived[:split]
            skips |= {facts.pops[index]: block for index, block in zip(layer.popped, arrived[split:], strict=True)}
        return values, skips


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
    partition = _Partition(layers, facts, len(input_bytes), departing)
    plain = _Blocks(costs)
    plain_values, plain_skips, _ = partition.forward(plain, graph=False)
    graph = _Blocks(costs)
    values, skips, graphs = partition.forward(graph, graph=True)
    leaving = [*(port.block for port in values), *skips]
    plain_leaving = [*(port.block for port in plain_values), *plain_skips]
    graph_memory = graph.take()
    gradients, skip_gradients = partition.backward(graph, graphs)
    returning = () if first else _distinct([*gradients, *(skip_gradients.get(number, NO_BLOCK) for number in arriving)])
    task = TaskWork(
        forward=_duration(layers, "plain", costs),
        recompute=_duration(layers, "forward", costs),
        backward=_duration(layers, "backward", costs),
        forward_memory=_renamed(plain.take(), dict(zip(plain_leaving, leaving, strict=True)), graph.count),
        graph_memory=graph_memory,
        backward_memory=graph.take(),
        output_bytes=tuple(port.bytes for port in values),
        input_bytes=tuple(input_bytes),
        leaving=_distinct(leaving) if _distinct(plain_leaving) else (),
        returning=returning,
        nodes=sum(layer.nodes for layer in layers),
    )
    return PartitionWork(task, partition.skip_bytes)


def _frees_input(step: Step, layer: LayerTrace) -> bool:
    return isinstance(step, Free) and step.block < layer.inputs


def _distinct(blocks: Sequence[int]) -> tuple[int, ...]:
    """Blocks, or nothing if one is missing, not of this task or there twice: then whoever runs it makes its own."""
    return tuple(blocks) if min(blocks, default=NO_BLOCK) >= 0 and len(set(blocks)) == len(blocks) else ()


def _renamed(ops: Sequence[MemoryOp], names: dict[int, int], first_free: int) -> tuple[MemoryOp, ...]:
    """The operations with outputs called as in the pass with graph, and everything else out of their way."""
    return tuple(
        op if op.kind == "scratch" else MemoryOp(op.kind, names.get(op.block, first_free + op.block), op.bytes)
        for op in ops
    )


def _duration(layers: Sequence[LayerTrace], direction: str, costs: Costs) -> Kernels:
    works = [costs.of(layer, direction) for layer in layers]
    return Kernels(sum(work.duration_ns for work in works), sum(work.launches for work in works))
