"""Traces the two parts of a layer's backward pass, I and W, as :mod:`gpipe_bench.autograd.split` runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from gpipe_bench.autograd.split import WeightsLater, backward_inputs, find_branches
from gpipe_bench.kernels.accelerator import accelerator_kernels
from gpipe_bench.kernels.kernel import SplitTrace
from gpipe_bench.kernels.specs import TensorSpec
from gpipe_bench.simulator.tracing.layer_trace import LayerTracing, give_gradients
from gpipe_bench.skip.namespace import SkipKey
from gpipe_bench.util.garbage import no_collection


def trace_split(
    layer: nn.Module,
    inputs: object,
    skips: dict[SkipKey, TensorSpec | None],
    wanted: Sequence[bool] | None,
) -> SplitTrace:
    """Trace I and W of a layer, of which some input needs a gradient.

    The arguments are those of :func:`.layer_trace.trace_layer`.
    """
    give_gradients(layer)
    with no_collection(), accelerator_kernels():
        tracing = LayerTracing(layer, inputs, skips)
        roots = tracing.leave(*tracing.forward(), wanted)
        branches = _branches([root.node for root in roots if root is not None], tracing.end)
        return SplitTrace(whole=True) if branches is None else _split(tracing, roots, branches)


def _branches(nodes: Sequence[Node], end: Node) -> list[Node] | None:
    """The nodes at which W begins; None if the backward pass is not cut."""
    cut = find_branches(nodes, end)
    if cut is None or not all(node in cut[0] for node in nodes):
        return None
    return list(cut[1])


def _split(tracing: LayerTracing, roots: list[Any], branches: list[Node]) -> SplitTrace:
    """Run both parts from ``roots``, which are let go of, as are the ``branches``."""
    recorder = tracing.recorder
    recorder.take()
    edges = [root for root in roots if root is not None]
    ones = [torch.ones((), device="meta") for _ in edges]
    with recorder:
        later = backward_inputs(edges, ones, tracing.end, tracing.leaf)
        if later is None:
            # All weights are those of custom functions, which compute the gradients in I.
            later = WeightsLater({}, [])
            torch.autograd.backward(edges, ones)
    found, tracing.received = tracing.received, ()
    inputs = recorder.take()
    received = tuple(map(recorder.block, tracing.spread(found)))
    gradients = tracing.output_gradients(roots)
    before = recorder.alive()
    roots.clear()
    edges.clear()
    later.free_saved()
    released = before - recorder.alive()
    del found
    kept = recorder.alive()
    recorder.take()
    # W lets go of each node once it has called it.
    branches.clear()
    with recorder:
        later.run()
    del later
    weights = recorder.take()
    return SplitTrace(
        inputs=inputs,
        weights=weights,
        released=tuple(sorted(released)),
        kept=tuple(sorted(kept)),
        output_gradients=gradients,
        input_gradients=received,
    )
