"""Traces one layer on the meta device, forward and backward, as autograd really runs it.

Inputs enter by a node that notes the gradient that arrives; outputs leave by a node that makes a gradient out of
nothing, which then belongs to autograd alone. In between nobody but layer and graph hold a tensor:

    block 0..k-1 ─ Enter ─ layer ─ Exit        forward: births, deaths, kernels; then what is left is what was kept
         ▲                           │
         └── noted gradient ◄────────┘         backward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gpipe_bench.engine.skip import Skippable
from gpipe_bench.engine.skip.namespace import SkipKey
from gpipe_bench.engine.skip.tracker import use_tracker
from gpipe_bench.simulator.collection import no_collection
from gpipe_bench.simulator.operations import tensors_of
from gpipe_bench.simulator.recorder import AcceleratorFunctions, Recorder
from gpipe_bench.simulator.steps import NO_BLOCK, Free, LayerTrace, Port, Step

__all__ = ["LayerRun", "TensorSpec", "declared_skips", "map_specs", "specs_in", "trace_layer"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    def encoded(self) -> dict[str, Any]:
        """It as JSON values."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"shape": self.shape, "stride": self.stride, "dtype": dtype, "requires_grad": self.requires_grad}

    @classmethod
    def decoded(cls, value: Any) -> Any:
        """Nested lists of what :meth:`encoded` made, as tuples of specs."""
        if isinstance(value, dict):
            dtype = getattr(torch, value["dtype"])
            return cls(tuple(value["shape"]), tuple(value["stride"]), dtype, value["requires_grad"])
        return tuple(cls.decoded(item) for item in value) if isinstance(value, list) else value

    def empty(self) -> Tensor:
        """A tensor like this on the meta device, which does not require grad yet."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


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
    for parameter in layer.parameters():
        parameter.grad = _gradient_of(parameter) if parameter.requires_grad else None
    with no_collection(), AcceleratorFunctions():
        plain, plain_ports = _trace_plain(layer, inputs, skips)
        return _Tracing(layer, inputs, skips).run(plain, plain_ports, wanted)


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    if type(parameter) is nn.Parameter and parameter.is_contiguous():
        # ``empty_like`` on the meta device loads a library for symbols, which takes a third of a second.
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return torch.empty_like(parameter)


def _trace_plain(layer: nn.Module, inputs: object, skips: Any) -> tuple[tuple[Step, ...], tuple[Port, ...]]:
    recorder = Recorder()
    tensors, popped = map_specs(TensorSpec.empty, inputs), map_specs(TensorSpec.empty, skips)
    for tensor in tensors_of([*_flat(tensors), *popped.values()]):
        recorder.adopt(tensor)
    tracker = _Skips(popped)
    with torch.no_grad(), recorder, use_tracker(tracker):
        output = layer(tensors)
    ports = _ports(recorder, [*_flat(output), *tracker.stashed.values()])
    return recorder.take(), ports


class _Tracing:
    """The pass with graph, and the backward pass."""

    def __init__(self, layer: nn.Module, inputs: object, skips: dict[SkipKey, TensorSpec | None]) -> None:
        self.recorder = Recorder()
        self.layer = layer
        self.input_specs = [*specs_in(inputs), *specs_in(skips)]
        self.received: list[Tensor | None] = [None] * len(self.input_specs)
        self.made: list[int] = []
        self._places = iter(range(len(self.input_specs)))
        self._structure = inputs, skips

    def run(self, plain: tuple[Step, ...], plain_ports: tuple[Port, ...], wanted: Sequence[bool] | None) -> LayerRun:
        recorder = self.recorder
        first_node = _next_node()
        output, stashed, popped = self._forward()
        entered = sum(spec.requires_grad for spec in self.input_specs)
        nodes = _next_node() - first_node - 1 - entered
        # An input that nothing needs is let go by whoever calls the layer, which ``kept`` tells.
        inside = range(len(self.input_specs))
        forward = tuple(step for step in recorder.take() if not (isinstance(step, Free) and step.block in inside))
        leaving = tensors_of([*_flat(output), *stashed.values()])
        ports = _ports(recorder, leaving)
        output_specs, stashed_specs = map_specs(TensorSpec.of, output), map_specs(TensorSpec.of, stashed)
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
            popped=tuple(pops.index(key) for key in popped),
            forward=forward,
            plain=plain,
            backward=backward,
            kept=tuple(sorted(kept)),
            output_gradients=gradients,
            input_gradients=arrived,
            nodes=nodes,
        )
        return LayerRun(trace, output_specs, stashed_specs, tuple(block != NO_BLOCK for block in arrived))

    def _forward(self) -> tuple[Any, dict[SkipKey, Tensor | None], list[SkipKey]]:
        inputs, skips = self._structure
        entered = map_specs(self._enter, inputs)
        popped = map_specs(self._enter, skips)
        tracker = _Skips(popped)
        with self.recorder, use_tracker(tracker):
            output = self.layer(entered)
        return output, tracker.stashed, list(skips)

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
        return entered

    def _exit(self, tensor: Tensor) -> Any:
        if not tensor.requires_grad:
            return None
        place = len(self.made)
        self.made.append(NO_BLOCK)

        def make(spec: TensorSpec) -> Tensor:
            with self.recorder.quiet():
                gradient = spec.empty()
            self.made[place] = self.recorder.adopt(gradient)
            return gradient

        return get_gradient_edge(_Exit.apply(tensor, make))  # type: ignore[no-untyped-call]  # likewise

    def _backward(self, roots: Sequence[Any]) -> tuple[int, ...]:
        self.recorder.accumulate(parameter.grad for parameter in self.layer.parameters())
        edges = [root for root in roots if root is not None]
        if edges:
            ones = [torch.ones((), device="meta") for _ in edges]
            with self.recorder:
                torch.autograd.backward(edges, ones)
        made = iter(self.made)
        return tuple(NO_BLOCK if root is None else next(made) for root in roots)


def map_specs(function: Callable[[Any], Any], value: Any) -> Any:
    """Nested tuples, lists and dictionaries with every tensor or spec replaced; anything else stays as it is."""
    if isinstance(value, Tensor | TensorSpec):
        return function(value)
    if isinstance(value, tuple | list):
        # A named tuple takes its items one by one, or together by `_make`.
        make = getattr(type(value), "_make", type(value))
        return make(map_specs(function, item) for item in value)
    if isinstance(value, dict):
        return {key: map_specs(function, item) for key, item in value.items()}
    return value


def specs_in(value: object) -> list[TensorSpec]:
    """The specs in nested tuples, lists and dictionaries."""
    return [item for item in _flat(value) if isinstance(item, TensorSpec)]


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _ports(recorder: Recorder, leaving: Sequence[object]) -> tuple[Port, ...]:
    return tuple(Port(recorder.block(tensor), tensor.nbytes) for tensor in tensors_of(leaving))


def _next_node() -> int:
    """The number of the autograd node that this makes: numbers count the nodes of a thread."""
    leaf = torch.empty(0, device="meta", requires_grad=True)
    node = leaf.view(0).grad_fn
    assert node is not None  # noqa: S101 - a view of a leaf has a node
    return node._sequence_nr()  # noqa: SLF001 - autograd's own count
