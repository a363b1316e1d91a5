"""Traces one layer on the meta device, forward and backward, as autograd really runs it.

Inputs enter by a node that notes the gradients that arrive; outputs leave by a node that makes a gradient out of
nothing, which then belongs to autograd alone. In between only the layer and its graph hold a tensor:

    block 0..k-1 ─ Enter ─ layer ─ Exit        forward: births, deaths, kernels; blocks left at the end are saved
         ▲                           │
         └── noted gradients ◄───────┘         backward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from gpipe_bench.autograd.split import WeightsLater, backward_inputs, find_branches
from gpipe_bench.kernels.accelerator import accelerator_kernels
from gpipe_bench.kernels.kernel import NO_BLOCK, Free, LayerTrace, Port, SplitTrace, Step
from gpipe_bench.kernels.operations import tensors_of
from gpipe_bench.kernels.specs import TensorSpec, map_specs, specs_in
from gpipe_bench.simulator.tracing.recorder import Recorder
from gpipe_bench.skip import Skippable
from gpipe_bench.skip.namespace import SkipKey
from gpipe_bench.skip.tracker import LocalTracker, use_tracker
from gpipe_bench.skip.trees import tree_leaves
from gpipe_bench.util.garbage import no_collection

Grads = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class LayerRun:
    """A trace, and what the next layers need to be traced.

    Attributes:
        trace: the trace.
        output: specs in the structure of the layer's output.
        stashed: spec of each skip that the layer stashes for a later one; None is legal.
        gradients: for each input, whether a gradient arrives at it.
    """

    trace: LayerTrace
    output: object
    stashed: dict[SkipKey, TensorSpec | None]
    gradients: tuple[bool, ...]


class _Enter(torch.autograd.Function):
    """(phony, note, tensors) -> these tensors, as outputs of one node, which notes their gradients."""

    @staticmethod
    def forward(ctx: Any, _phony: Tensor, note: Callable[[Grads], None], tensors: Sequence[Tensor]) -> Grads:
        ctx.set_materialize_grads(False)
        ctx.note = note
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.note(grads)
        return None, None, None


class _Exit(torch.autograd.Function):
    is_pure_to_gpipe_bench = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[TensorSpec], Tensor]) -> Tensor:
        ctx.make, ctx.spec = make, TensorSpec.of(x)
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        return ctx.make(ctx.spec), None


def declared_skips(layer: nn.Module) -> tuple[list[SkipKey], list[SkipKey]]:
    """Skips that a layer and the layers inside it declare to stash for others, and to pop or peek from others."""
    inside = [module for module in layer.modules() if isinstance(module, Skippable)]
    stashes = [key for module in inside for key in module.stashes()]
    reads = [key for module in inside for key in (*module.pops(), *module.peeks()) if key not in stashes]
    popped_inside = {key for module in inside for key in module.pops()}
    return [key for key in stashes if key not in popped_inside], [*dict.fromkeys(reads)]


def trace_layer(
    layer: nn.Module, inputs: object, skips: dict[SkipKey, TensorSpec | None], wanted: Sequence[bool] | None = None
) -> LayerRun:
    """Trace a layer.

    Args:
        layer: on the meta device, in training mode or not; its gradients are set.
        inputs: specs in the structure of the layer's input.
        skips: spec of each skip that it reads.
        wanted: for each tensor that leaves, whether a gradient comes back for it; for all by default.
    """
    give_gradients(layer)
    with no_collection(), accelerator_kernels():
        plain = _trace_plain(layer, inputs, skips)
        return _trace_with_graph(LayerTracing(layer, inputs, skips), plain, wanted)


def give_gradients(layer: nn.Module) -> None:
    """Set the gradients of a layer, so that a backward pass adds to them."""
    for parameter in layer.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None


class _Plain(NamedTuple):
    """The pass without graph: its steps, what leaves it, and the inputs that it writes to."""

    steps: tuple[Step, ...]
    outputs: tuple[Port, ...]
    writes: tuple[int, ...]


def _trace_plain(layer: nn.Module, inputs: object, skips: dict[SkipKey, TensorSpec | None]) -> _Plain:
    recorder = Recorder()
    entered: list[Tensor] = []

    def enter(spec: TensorSpec) -> Tensor:
        entered.append(spec.empty())
        recorder.adopt(entered[-1])
        return entered[-1]

    with torch.no_grad():
        output, stashed = _run_layer(layer, recorder, map_specs(enter, (inputs, skips)))
    ports = _ports(recorder, [*tree_leaves(output), *stashed.values()])
    writes = tuple(place for place, tensor in enumerate(entered) if tensor._version)  # noqa: SLF001 - its count of writes
    return _Plain(recorder.take(), ports, writes)


def _run_layer(layer: nn.Module, recorder: Recorder, entered: Any) -> tuple[Any, dict[SkipKey, Tensor | None]]:
    """Run a layer on what entered, inputs and skips; gives its output and the skips that it stashed."""
    inputs, skips = entered
    came = [*skips]
    tracker = LocalTracker(skips.items())
    # From here on the tracker alone holds them.
    skips.clear()
    with recorder, use_tracker(tracker):
        output = layer(inputs)
        for key in came:
            tracker.values.pop(key, None)
    return output, tracker.values


class LayerTracing:
    """The pass with graph, between the node by which inputs enter and those by which outputs leave.

    Attributes:
        layer: what is traced.
        structure: specs of inputs and skips, as they enter.
        recorder: watches it.
        specs: of the inputs, skips last.
        leading: places of the inputs that need a gradient.
        end: the node by which these enter, if there are any.
        leaf: behind it.
        received: their gradients, once they have arrived there.
    """

    end: Node
    leaf: Tensor
    received: Grads = ()

    def __init__(self, layer: nn.Module, inputs: object, skips: dict[SkipKey, TensorSpec | None]) -> None:
        self.recorder = Recorder()
        self.specs = [*specs_in(inputs), *specs_in(skips)]
        self.leading = [place for place, spec in enumerate(self.specs) if spec.requires_grad]
        self.layer, self.structure = layer, (inputs, skips)
        self._made: list[int] = []

    def forward(self) -> tuple[Any, dict[SkipKey, Tensor | None]]:
        """Run the layer; gives its output and the skips that it stashed."""
        waiting = self._enter()
        return _run_layer(self.layer, self.recorder, map_specs(lambda _: waiting.pop(), self.structure))

    def _enter(self) -> list[Tensor]:
        """What enters, in reversed order."""
        tensors = [spec.empty() for spec in self.specs]
        for tensor in tensors:
            self.recorder.adopt(tensor)
        if self.leading:
            self.leaf = torch.empty(0, device="meta", requires_grad=True)
            leading = [tensors[place] for place in self.leading]
            entered = _Enter.apply(self.leaf, self._note, leading)  # type: ignore[no-untyped-call, unused-ignore]  # PyTorch's
            self.end = entered[0].grad_fn
            for place, tensor in zip(self.leading, entered, strict=True):
                tensors[place] = tensor.view_as(tensor) if self.specs[place].view else tensor
        return tensors[::-1]

    def _note(self, gradients: Grads) -> None:
        self.received = gradients

    def leave(self, output: object, stashed: dict[SkipKey, Any], wanted: Sequence[bool] | None) -> list[Any]:
        """Where the backward pass begins for each tensor that leaves; None if it does not. See :func:`trace_layer`."""
        leaving = tensors_of([*tree_leaves(output), *stashed.values()])
        asked = [True] * len(leaving) if wanted is None else wanted
        self.recorder.accumulate(parameter.grad for parameter in self.layer.parameters())
        return [self._exit(tensor) if ask else None for tensor, ask in zip(leaving, asked, strict=True)]

    def _exit(self, tensor: Tensor) -> Any:
        if not tensor.requires_grad:
            return None
        place = len(self._made)
        self._made.append(NO_BLOCK)

        def make(spec: TensorSpec) -> Tensor:
            with torch._C._DisableTorchDispatch():  # noqa: SLF001 - it is the tracer that makes it, not the layer
                gradient = spec.empty()
            self._made[place] = self.recorder.adopt_gradient(gradient)
            return gradient

        return get_gradient_edge(_Exit.apply(tensor, make))  # type: ignore[no-untyped-call, unused-ignore]  # likewise

    def output_gradients(self, roots: Sequence[object]) -> tuple[int, ...]:
        """The block of the gradient that each root got."""
        made = iter(self._made)
        return tuple(NO_BLOCK if root is None else next(made) for root in roots)

    def spread(self, gradients: Grads) -> list[Tensor | None]:
        """For each input its gradient; ``gradients``: of those that lead, nothing if none has arrived."""
        found = dict(zip(self.leading, gradients, strict=bool(gradients)))
        return [found.get(place) for place in range(len(self.specs))]


def _trace_with_graph(tracing: LayerTracing, plain: _Plain, wanted: Sequence[bool] | None) -> LayerRun:
    """Run the passes with graph; ``plain``: what the one without gave."""
    recorder, specs = tracing.recorder, tracing.specs
    first_node = _next_node()
    output, stashed = tracing.forward()
    entered = bool(tracing.leading) + sum(specs[place].view for place in tracing.leading)
    nodes = _next_node() - first_node - 1 - entered
    # The caller of the layer frees an input that nothing needs; ``kept`` tells which.
    inside = range(len(specs))
    forward = tuple(step for step in recorder.take() if not (isinstance(step, Free) and step.block in inside))
    ports = _ports(recorder, [*tree_leaves(output), *stashed.values()])
    left, left_skips = map_specs(TensorSpec.leaving, output), map_specs(TensorSpec.leaving, stashed)
    roots = tracing.leave(output, stashed, wanted)
    del output, stashed
    kept = recorder.alive()
    recorder.take()
    edges = [root for root in roots if root is not None]
    if edges:
        ones = [torch.ones((), device="meta") for _ in edges]
        with recorder:
            torch.autograd.backward(edges, ones)
    received = tracing.spread(tracing.received)
    stashes, reads = declared_skips(tracing.layer)
    trace = LayerTrace(
        inputs=len(specs),
        outputs=ports,
        plain_outputs=plain.outputs,
        stashed=tuple(stashes.index(key) for key in left_skips),
        read=tuple(reads.index(key) for key in tracing.structure[1]),
        forward=forward,
        plain=plain.steps,
        backward=recorder.take(),
        kept=tuple(sorted(kept)),
        output_gradients=tracing.output_gradients(roots),
        input_gradients=tuple(map(recorder.block, received)),
        nodes=nodes,
        writes=plain.writes,
        needs=tuple(spec.requires_grad for spec in specs),
        fits=tuple(tensor is None or spec.fits(tensor) for tensor, spec in zip(received, specs, strict=True)),
        views=tuple(tensor is not None and tensor._is_view() for tensor in received),  # noqa: SLF001 - its word
    )
    return LayerRun(trace, left, left_skips, tuple(block != NO_BLOCK for block in trace.input_gradients))


def _ports(recorder: Recorder, leaving: Sequence[object]) -> tuple[Port, ...]:
    return tuple(
        Port(recorder.block(tensor), tensor.nbytes, TensorSpec.leaving(tensor).view) for tensor in tensors_of(leaving)
    )


def _next_node() -> int:
    """The number of the autograd node that this makes: numbers count the nodes of a thread."""
    leaf = torch.empty(0, device="meta", requires_grad=True)
    node = leaf.view(0).grad_fn
    assert node is not None  # noqa: S101 - a view of a leaf has a node
    return node._sequence_nr()  # noqa: SLF001 - autograd's own count


def trace_split(
    layer: nn.Module,
    inputs: object,
    skips: dict[SkipKey, TensorSpec | None],
    wanted: Sequence[bool] | None,
) -> SplitTrace:
    """Trace I and W of a layer, of which some input needs a gradient, as :mod:`gpipe_bench.autograd.split` runs them.

    The arguments are those of :func:`trace_layer`.
    """
    give_gradients(layer)
    with no_collection(), accelerator_kernels():
        tracing = LayerTracing(layer, inputs, skips)
        roots = tracing.leave(*tracing.forward(), wanted)
        nodes = [root.node for root in roots if root is not None]
        cut = find_branches(nodes, tracing.end)
        if cut is None or not all(node in cut[0] for node in nodes):
            return SplitTrace(whole=True)
        branches = list(cut[1])
        del nodes, cut
        return _split(tracing, roots, branches)


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
    later.free_saved()
    shown = recorder.alive()
    roots.clear()
    edges.clear()
    hidden = shown - recorder.alive()
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
        released=tuple(sorted(before - shown)),
        hidden=tuple(sorted(hidden)),
        kept=tuple(sorted(kept)),
        output_gradients=gradients,
        input_gradients=received,
    )
