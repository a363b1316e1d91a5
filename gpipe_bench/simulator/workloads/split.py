"""Puts I and W of layers together to the two parts of a partition's backward pass.

    I    layer 3 ─► layer 2 ─► layer 1      at its end everything is freed that W does not need
    W    layer 3 ─► layer 2 ─► layer 1      at its end go the gradients that I noted, and all nodes

A partition without gradients for its inputs has all of the backward pass in W; one that the engine does not cut has it
in I. So has one in which a layer makes values of weights alone: there the engine cuts, and the simulation does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpipe_bench.kernels.kernel import NO_BLOCK, LayerTrace, SplitTrace
from gpipe_bench.simulator.workloads.blocks import Blocks, Costs
from gpipe_bench.simulator.workloads.layer_passes import LayerPasses, name_gradients, pass_on
from gpipe_bench.simulator.workloads.workload import NOTHING, SplitWork, TaskWork

SplitLayers = Callable[[int], SplitTrace]
"""Layer of the partition -> I and W of the layer."""


def split_work(partition: LayerPasses, task: TaskWork, costs: Costs, layers: SplitLayers) -> SplitWork:
    """I and W of a partition with this work; ``layers``: those of each layer."""
    if not task.learns:
        return SplitWork(NOTHING, NOTHING)
    if not task.returning:
        return SplitWork(NOTHING, task.backward, (), task.backward_memory)
    traces = None if any(map(_begins, partition.layers)) else _traces(partition, layers)
    if traces is None:
        return SplitWork(task.backward, NOTHING, task.backward_memory, (), task.returning)
    return _composed(partition, traces, costs)


def _works(layer: LayerTrace) -> bool:
    return any(block != NO_BLOCK for block in layer.output_gradients)


def _begins(layer: LayerTrace) -> bool:
    """Whether gradients come to a layer and go no further."""
    return _works(layer) and all(block == NO_BLOCK for block in layer.input_gradients)


def _traces(partition: LayerPasses, layers: SplitLayers) -> list[SplitTrace] | None:
    """I and W of each layer; None if one of them cannot be cut."""
    found = []
    for at, layer in enumerate(partition.layers):
        nothing = (NO_BLOCK,) * layer.inputs
        idle = SplitTrace(output_gradients=layer.output_gradients, input_gradients=nothing)
        found.append(layers(at) if _works(layer) else idle)
    return None if any(trace.whole for trace in found) else found


def _composed(partition: LayerPasses, traces: Sequence[SplitTrace], costs: Costs) -> SplitWork:
    blocks = Blocks(costs)
    _, _, graphs = partition.forward(blocks, graph=True)
    blocks.take()
    names = [dict(kept) for kept in graphs]

    def run(at: int, gradients: list[int]) -> list[int]:
        trace = traces[at]
        name_gradients(blocks, trace.output_gradients, names[at], gradients)
        blocks.run(trace.inputs, names[at])
        return pass_on(blocks, trace.input_gradients, names[at], {*trace.kept, *trace.released})

    values, skips = partition.gradients()
    for block in (*values, *skips.values()):
        blocks.hold(block)
    values, skips = partition.back(blocks, values, skips, run)
    returning = (*values, *(skips.get(copy, NO_BLOCK) for copy in partition.arriving))
    blocks.leave(returning)
    backwards = range(len(traces) - 1, -1, -1)
    for at in backwards:
        for block in traces[at].released:
            blocks.drop(names[at].pop(block))
    inputs_memory = blocks.take()
    for at in backwards:
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
