"""Traces one layer on the meta device, forward and backward, as autograd really runs it.

Inputs enter by a node that notes the gradient that arrives; outputs leave by a node that makes a gradient out of
nothing, which then belongs to autograd alone. In between nobody but layer and graph hold a tensor:

    block 0..k-1 ─ Enter ─ layer ─ Exit        forward: births, deaths, kernels; blocks left at the end are saved
         ▲                           │
         └── noted gradient ◄────────┘         backward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gpipe_bench.collection import no_collection
from gpipe_bench.simulator.tracing.accelerator import accelerator_kernels
from gpipe_bench.simulator.tracing.operations import tensors_of
from gpipe_bench.simulator.tracing.recorder import Recorder
from gpipe_bench.simulator.tracing.specs import TensorSpec, flat, map_specs, specs_in
from gpipe_bench.simulator.tracing.steps import NO_BLOCK, Free, LayerTrace, Port, Step
from gpipe_bench.skip import Skippable
from gpipe_bench.skip.namespace import SkipKey
from gpipe_bench.skip.tracker import use_tracker

__all__ = ["LayerRun", "LayerTracing", "declared_skips", "give_gradients", "trace_layer"]


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
    @staticmethod
    def forward(ctx: Any, _phony: Tensor, x: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        ctx.note = note
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.note(grad)
        return None, None, None


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[TensorSpec], Tensor]) -> Tensor:
        ctx.make, ctx.spec = make, TensorSpec.of(x)
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        return ctx.make(ctx.spec), None


class _Skips:
    """The tracker of one run: gives skips that were stashed before, keeps those that stay on board after."""

    def __init__(self, available: dict[SkipKey, Tensor | None]) -> None:
        self.available = available
        self.stashed: dict[SkipKey, Tensor | None] = {}

    def save(self, key: SkipKey, value: Tensor | None) -> None:
        self.stashed[key] = value

    def load(self, key: SkipKey) -> Tensor | None:
        return self.stashed.pop(key) if key in self.stashed else self.available.pop(key)


def declared_skips(layer: nn.Module) -> tuple[list[SkipKey], list[SkipKey]]:
    """Skips that a layer and the layers inside it declare to stash, and to pop for which nothing inside is stashed."""
    inside = [module for module in layer.modules() if isinstance(module, Skippable)]
    stashes = [key for module in inside for key in module.stashes()]
    pops = [key for module in inside for key in module.pops() if key not in stashes]
    popped_inside = {key for module in inside for key in module.pops()}
    return [key for key in stashes if key not in popped_inside], pops


def trace_layer(
    layer: nn.Module, inputs: object, skips: dict[SkipKey, TensorSpec | None], wanted: Sequence[bool] | None = None
) -> LayerRun:
    """Trace a layer.

    Args:
        layer: on the meta device, in training mode or not; its gradients are set.
        inputs: specs in the structure of the layer's input.
        skips: spec of each skip that it pops.
        wanted: for each tensor that leaves, whether a gradient comes back for it; for all by default.
    """
    give_gradients(layer)
    with no_collection():
        plain, plain_ports, writes = _trace_plain(layer, inputs, skips)
        return LayerTracing(layer, inputs, skips, writes).run(plain, plain_ports, wanted)


def give_gradients(layer: nn.Module) -> None:
    """Set the gradients of a layer, so that a backward pass adds to them."""
    for parameter in layer.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None


def _trace_plain(
    layer: nn.Module, inputs: object, skips: dict[SkipKey, TensorSpec | None]
) -> tuple[tuple[Step, ...], tuple[Port, ...], tuple[int, ...]]:
    """The pass without graph: its steps, what leaves it, and the inputs that it writes to."""
    recorder = Recorder()
    entered: list[Tensor] = []

    def enter(spec: TensorSpec) -> Tensor:
        entered.append(spec.empty())
        recorder.adopt(entered[-1])
        return entered[-1]

    with torch.no_grad():
        output, stashed = _run_layer(layer, recorder, map_specs(enter, (inputs, skips)))
    ports = _ports(recorder, [*flat(output), *stashed.values()])
    writes = tuple(place for place, tensor in enumerate(entered) if tensor._version)  # noqa: SLF001 - its count of writes
    return recorder.take(), ports, writes


def _run_layer(layer: nn.Module, recorder: Recorder, entered: Any) -> tuple[Any, dict[SkipKey, Tensor | None]]:
    """Run a layer on what entered, inputs and skips; gives its output and the skips that it stashed."""
    inputs, skips = entered
    tracker = _Skips(skips)
    with recorder, accelerator_kernels(), use_tracker(tracker):
        return layer(inputs), tracker.stashed


class LayerTracing:
    """The pass with graph, and the backward pass."""

    def __init__(
        self, layer: nn.Module, inputs: object, skips: dict[SkipKey, TensorSpec | None], writes: tuple[int, ...]
    ) -> None:
        self.recorder = Recorder()
        self.layer, self.writes = layer, writes
        self.input_specs = [*specs_in(inputs), *specs_in(skips)]
        self.received: list[Tensor | None] = [None] * len(self.input_specs)
        self.made: list[int] = []
        self._places = iter(range(len(self.input_specs)))
        self._structure = inputs, skips

    def run(self, plain: tuple[Step, ...], plain_ports: tuple[Port, ...], wanted: Sequence[bool] | None) -> LayerRun:
        """Run both; ``plain`` and its ports: the pass without graph, ``wanted``: see :func:`trace_layer`."""
        recorder = self.recorder
        first_node = _next_node()
        output, stashed = self._forward()
        entered = sum(spec.requires_grad + spec.view for spec in self.input_specs)
        nodes = _next_node() - first_node - 1 - entered
        # The caller of the layer frees an input that nothing needs; ``kept`` tells which.
        inside = range(len(self.input_specs))
        forward = tuple(step for step in recorder.take() if not (isinstance(step, Free) and step.block in inside))
        leaving = tensors_of([*flat(output), *stashed.values()])
        ports = _ports(recorder, leaving)
        output_specs, stashed_specs = map_specs(TensorSpec.leaving, output), map_specs(TensorSpec.leaving, stashed)
        asked = [True] * len(leaving) if wanted is None else wanted
        roots = [self._exit(tensor) if ask else None for tensor, ask in zip(leaving, asked, strict=True)]
        del output, stashed, leaving
        kept = recorder.alive()
        recorder.take()
        gradients = self._backward(roots)
        backward = recorder.take()
        arrived = tuple(recorder.block(tensor) for tensor in self.received)
        stashes, pops = declared_skips(self.layer)
        trace = LayerTrace(
            inputs=len(self.input_specs),
            outputs=ports,
            plain_outputs=plain_ports,
            stashed=tuple(stashes.index(key) for key in stashed_specs),
            popped=tuple(pops.index(key) for key in self._structure[1]),
            forward=forward,
            plain=plain,
            backward=backward,
            kept=tuple(sorted(kept)),
            output_gradients=gradients,
            input_gradients=arrived,
            nodes=nodes,
            writes=self.writes,
            needs=tuple(spec.requires_grad for spec in self.input_specs),
            fits=tuple(
                tensor is None or spec.fits(tensor)
                for tensor, spec in zip(self.received, self.input_specs, strict=True)
            ),
            views=tuple(tensor is not None and tensor._is_view() for tensor in self.received),  # noqa: SLF001 - its word
        )
        return LayerRun(trace, output_specs, stashed_specs, tuple(block != NO_BLOCK for block in arrived))

    def _forward(self) -> tuple[Any, dict[SkipKey, Tensor | None]]:
        return _run_layer(self.layer, self.recorder, map_specs(self._enter, self._structure))

    def _enter(self, spec: TensorSpec) -> Tensor:
        tensor = spec.empty()
        self.recorder.adopt(tensor)
        place = next(self._places)
        if not spec.requires_grad:
            return tensor
        phony = torch.empty(0, device="meta", requires_grad=True)

        def note(gradient: Tensor) -> None:
            self.received[place] = gradient

        entered: Tensor = _Enter.apply(phony, tensor, note)  # type: ignore[no-untyped-call]  # PyTorch's
        return entered.view_as(entered) if spec.view else entered

    def _exit(self, tensor: Tensor) -> Any:
        if not tensor.requires_grad:
            return None
        place = len(self.made)
        self.made.append(NO_BLOCK)

        def make(spec: TensorSpec) -> Tensor:
            with torch._C._DisableTorchDispatch():  # noqa: SLF001 - it is the tracer that makes it, not the layer
                gradient = spec.empty()
            self.made[place] = self.recorder.adopt(gradient)
            return gradient

        return get_gradient_edge(_Exit.apply(tensor, make))  # type: ignore[no-untyped-call]  # likewise

    def _backward(self, roots: Sequence[Any]) -> tuple[int, ...]:
        self.recorder.accumulate(parameter.grad for parameter in self.layer.parameters())
        edges = [root for root in roots if root is not None]
        if edges:
            ones = [torch.ones((), device="meta") for _ in edges]
            with self.recorder, accelerator_kernels():
                torch.autograd.backward(edges, ones)
        made = iter(self.made)
        return tuple(NO_BLOCK if root is None else next(made) for root in roots)


def _ports(recorder: Recorder, leaving: Sequence[object]) -> tuple[Port, ...]:
    return tuple(Port(recorder.block(tensor), tensor.nbytes) for tensor in tensors_of(leaving))


def _next_node() -> int:
    """The number of the autograd node that this makes: numbers count the nodes of a thread."""
    leaf = torch.empty(0, device="meta", requires_grad=True)
    node = leaf.view(0).grad_fn
    assert node is not None  # noqa: S101 - a view of a leaf has a node
    return node._sequence_nr()  # noqa: SLF001 - autograd's own count
