"""Puts traces of layers together to the work of a partition: kernels in a row, blocks that layers share.

A checkpoint has a work of its own where it copies inputs that layers write to, and gradients that others hold too or
that are not laid out as its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from gpipe_bench.kernels.kernel import NO_BLOCK, Kernel, LayerFacts, LayerTrace
from gpipe_bench.simulator.workloads.blocks import Blocks, Costs, total
from gpipe_bench.simulator.workloads.layer_passes import LayerPasses, SkipCopy
from gpipe_bench.simulator.workloads.split import SplitLayers, split_work
from gpipe_bench.simulator.workloads.workload import Kernels, MemoryOp, TaskWork, in_turn


@dataclass(frozen=True, slots=True)
class PartitionWork:
    """The work of a partition, and the skips that cross its borders.

    Attributes:
        task: the work.
        departing: copy of a skip -> bytes.
        returning: copies that arrive for which gradients go back.
    """

    task: TaskWork
    departing: dict[SkipCopy, int]
    returning: set[SkipCopy]


def compose(
    passes: Callable[..., LayerPasses], costs: Costs, split: SplitLayers | None = None, *, first: bool, leaves: bool
) -> PartitionWork:
    """The work of a partition for micro-batches of one size.

    Args:
        passes: makes those of its layers, with ``apart`` and ``copies`` as :class:`LayerPasses` has them.
        costs: of the layers on the device.
        split: I and W of the layers, if the backward pass is split.
        first: whether the partition is the first one, whose inputs need no gradient.
        leaves: whether the inputs of a checkpoint become leaves of autograd.
    """
    partition = passes()
    task, returning = _task(partition, costs, split, first=first)
    if task.learns and (partition.writes or (leaves and partition.cloned)):
        apart = passes(apart=leaves, copies=partition.writes)
        task = replace(task, checkpointed=_task(apart, costs, split, first=first)[0])
    return PartitionWork(task, partition.skip_bytes, returning)


def _task(
    partition: LayerPasses, costs: Costs, split: SplitLayers | None, *, first: bool
) -> tuple[TaskWork, set[SkipCopy]]:
    """The work of a partition, and the copies of skips that arrive and need gradients."""
    layers, arriving = partition.layers, partition.arriving
    plain, blocks = Blocks(costs), Blocks(costs)
    plain_values, plain_skips, _ = partition.forward(plain, graph=False)
    values, skips, graphs = partition.forward(blocks, graph=True)
    leaving = [*(port.block for port in values), *skips]
    renamed = _one_to_one([*(port.block for port in plain_values), *plain_skips], leaving)
    graph_memory, made = blocks.take(), blocks.count
    gradients, skip_gradients = partition.backward(blocks, graphs)
    copying = _clones((*partition.bytes, *arriving.values()) if partition.copies else (), costs)
    cloning = in_turn([costs.sums(partition.added), _clones(partition.cloned if partition.apart else (), costs)])
    task = TaskWork(
        forward=costs.total_of(layers, "plain", copying),
        recompute=costs.total_of(layers, "forward", copying),
        backward=costs.total_of(layers[::-1], "backward", cloning),
        forward_memory=_renamed(plain.take(), renamed or {}, made),
        graph_memory=graph_memory,
        backward_memory=blocks.take(),
        output_bytes=tuple(port.bytes for port in values),
        input_bytes=partition.bytes,
        leaving=() if renamed is None else _some(leaving),
        returning=() if first else _some([*gradients, *(skip_gradients.get(copy, NO_BLOCK) for copy in arriving)]),
        nodes=sum(layer.nodes for layer in layers),
        learns=_learns(layers, partition.facts),
        returns=() if first or all(partition.needs) else partition.needs,
    )
    if split is not None:
        task = replace(task, split=split_work(partition, task, costs, split))
    return task, {copy for copy in arriving if copy[0] in partition.skip_needs}


def _clones(sizes: Iterable[int], costs: Costs) -> Kernels:
    """Copies of tensors on their device, by their bytes."""
    return total((Kernel.copy("clone", nbytes) for nbytes in sizes), costs.profile)


def _learns(layers: Sequence[LayerTrace], facts: Sequence[LayerFacts]) -> bool:
    """Whether any parameter is trained, or an input needs a gradient, so that it goes through some layer."""
    return any(layer.learns for layer in facts) or any(set(layer.output_gradients) - {NO_BLOCK} for layer in layers)


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
