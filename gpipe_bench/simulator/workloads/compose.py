"""Puts traces of layers together to the work of a partition: kernels in a row, blocks that layers share.

A checkpoint has a work of its own where it copies inputs that layers write to, and gradients that others hold too or
that are not laid out as its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from gpipe_bench.kernels.kernel import NO_BLOCK, Kernel, SplitLayers, SplitTrace
from gpipe_bench.simulator.workloads.blocks import Blocks, Costs, total
from gpipe_bench.simulator.workloads.layer_passes import LayerPasses, SkipCopy, name_gradients, pass_on
from gpipe_bench.simulator.workloads.workload import NOTHING, Kernels, MemoryOp, SplitWork, TaskWork, in_turn


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
        # A parameter is trained, or an input needs a gradient, which then goes through some layer.
        learns=any(facts.learns for facts in partition.facts)
        or any({*layer.output_gradients} - {NO_BLOCK} for layer in layers),
        returns=() if first or all(partition.needs) else partition.needs,
    )
    if split is not None:
        task = replace(task, split=split_work(partition, task, costs, split))
    return task, {copy for copy in arriving if copy[0] in partition.skip_needs}


def split_work(partition: LayerPasses, task: TaskWork, costs: Costs, layers: SplitLayers) -> SplitWork:
    """I and W of a partition with this work; ``layers``: those of each layer.

        I    layer 3 ─► layer 2 ─► layer 1      at its end everything is freed that W does not need
        W    layer 3 ─► layer 2 ─► layer 1      at its end go the gradients that I noted, and all nodes

    A partition without gradients for its inputs has all of the backward pass in W; one that the engine does not cut has
    it in I. So has one in which a layer makes values of weights alone, so that gradients come to it and go no further:
    there the engine cuts, and the simulation does not.
    """
    if not task.learns:
        return SplitWork(NOTHING, NOTHING)
    if not task.returning:
        return SplitWork(NOTHING, task.backward, (), task.backward_memory)
    whole = SplitWork(task.backward, NOTHING, task.backward_memory, (), task.returning)
    works = [bool({*layer.output_gradients} - {NO_BLOCK}) for layer in partition.layers]
    if any(own and {*layer.input_gradients} <= {NO_BLOCK} for own, layer in zip(works, partition.layers, strict=True)):
        return whole
    traces = []
    for at, layer in enumerate(partition.layers):
        nothing = (NO_BLOCK,) * layer.inputs
        idle = SplitTrace(output_gradients=layer.output_gradients, input_gradients=nothing)
        traces.append(layers(at) if works[at] else idle)
    if any(trace.whole for trace in traces):
        return whole
    blocks = Blocks(costs)
    _, _, graphs = partition.forward(blocks, graph=True)
    blocks.take()
    names = [dict(kept) for kept in graphs]

    def run(at: int, gradients: list[int]) -> list[int]:
        trace = traces[at]
        name_gradients(blocks, trace.output_gradients, names[at], gradients)
        blocks.run(trace.inputs, names[at])
        return pass_on(blocks, trace.input_gradients, names[at], {*trace.kept, *trace.released, *trace.hidden})

    values, skips = partition.gradients()
    for block in (*values, *skips.values()):
        blocks.hold(block)
    values, skips = partition.back(blocks, values, skips, run)
    returning = (*values, *(skips.get(copy, NO_BLOCK) for copy in partition.arriving))
    blocks.leave(returning)
    backwards = range(len(traces) - 1, -1, -1)
    # The nodes of the last layer that waits for W hold those of all layers before it.
    last = next((at for at in backwards if any(traces[at].kernels("weights"))), 0)
    for at in backwards:
        for block in (*traces[at].released, *(traces[at].hidden if at >= last else ())):
            blocks.drop(names[at].pop(block))
    inputs_memory = blocks.take()
    for at in backwards:
        for block in traces[at].hidden if at < last else ():
            blocks.drop(names[at].pop(block))
        blocks.run(traces[at].weights, names[at])
        for name in names[at].values():
            blocks.drop(name)
    return SplitWork(
        costs.total_of(traces[::-1], "inputs", costs.sums(partition.added)),
        costs.total_of(traces[::-1], "weights"),
        inputs_memory,
        blocks.take(),
        returning,
    )


def _clones(sizes: Iterable[int], costs: Costs) -> Kernels:
    """Copies of tensors on their device, by their bytes."""
    return total((Kernel.copy("clone", nbytes) for nbytes in sizes), costs.profile)


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
