"""Traces a whole model: each kind of layer once.

Shapes go through the model from its first layer to its last; then, from the last to the first, which gradients exist:
an output that nobody reads gets none, and the layer's backward pass is shorter for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.errors import TraceError
from gpipe_bench.kernels.kernel import LayerFacts, LayerTrace, Parameter, TiedWeight
from gpipe_bench.kernels.precision import in_precision
from gpipe_bench.kernels.specs import TensorSpec, map_specs, meta_twin, specs_in
from gpipe_bench.settings import HALVES
from gpipe_bench.simulator.tracing.layer_trace import LayerRun, declared_skips, trace_layer
from gpipe_bench.simulator.tracing.scaling import PROBES
from gpipe_bench.skip import verify_skippables
from gpipe_bench.skip.namespace import SkipKey

_Skips = dict[SkipKey, TensorSpec | None]
_Call = tuple[object, _Skips]
"""What enters a layer."""
_Runs = tuple[LayerRun, LayerRun]
"""The run of a layer among others, and as the first of a partition."""


_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, type)
# Names of skips matter, the namespaces that tell equal names apart do not.
_SKIPPED = frozenset({"_parameters", "_buffers", "_modules", "_skip_namespaces"})
# Dictionaries of hooks that every module has, mostly empty: then they say nothing.
_HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict)) - _SKIPPED


@dataclass(frozen=True, slots=True)
class Trace:
    """A model at one batch size; layers that are alike share a trace.

    Attributes:
        layers: the trace of each layer.
        firsts: the same, were it the first of a partition.
        output: specs in the structure of the model's output.
    """

    layers: tuple[LayerTrace, ...]
    firsts: tuple[LayerTrace, ...]
    output: object


class Tracer:
    """Traces a model at any batch size; it is left as it was.

    Args:
        module: the model, on any device.
        sample: one sample or more, as the model takes them: a Tensor or a tuple of Tensors on any device.
        owned: whether the module is on the meta device and nobody else's, so that its layers need not be copied.
        precision: what to trace it in, one of :data:`gpipe_bench.settings.PRECISIONS`.
    """

    def __init__(
        self,
        module: nn.Sequential,
        sample: Tensor | tuple[Tensor, ...],
        *,
        owned: bool = False,
        precision: str = "float32",
    ) -> None:
        verify_skippables(module)
        if precision in HALVES:
            module, owned = _cast(module, precision, owned=owned), True
        self.module, self._owned = module, owned
        self._sample = map_specs(lambda tensor: TensorSpec.of(in_precision(tensor, precision)), sample)
        self._declared = [declared_skips(layer) for layer in module]
        # In place of signatures, which are long: a number for each kind of layer.
        numbers: dict[Hashable, int] = {}
        self._kinds: list[int] = []
        for place, layer in enumerate(module):
            with _explained(f"layer {place} ({type(layer).__name__})"):
                self._kinds.append(numbers.setdefault(signature(layer), len(numbers)))
        self._twins: dict[int, nn.Module] = {}
        self._traces: dict[int, Trace] = {}
        self._runs: dict[Hashable, LayerRun] = {}
        self._asked: dict[int, tuple[int, _Call, tuple[bool, ...] | None]] = {}

    def facts(self) -> list[LayerFacts]:
        """Parameters, buffers and skips of each layer."""
        numbers: dict[SkipKey, int] = {}
        homes: dict[int, tuple[int, int]] = {}
        facts = []
        for place, (layer, (stashes, reads)) in enumerate(zip(self.module, self._declared, strict=True)):
            for key in stashes:
                numbers[key] = len(numbers)
            found = {p: homes.setdefault(id(p), (place, len(homes))) for p in layer.parameters()}
            own = [p for p, (first, _) in found.items() if first == place]
            trained = [parameter for parameter in own if parameter.requires_grad]
            others = [*(p for p in own if not p.requires_grad), *layer.buffers()]
            facts.append(
                LayerFacts(
                    tuple(Parameter(p.numel(), str(p.dtype).removeprefix("torch."), p.nbytes) for p in trained),
                    others=tuple(tensor.nbytes for tensor in others),
                    stashes=tuple(numbers[key] for key in stashes),
                    reads=tuple(numbers[key] for key in reads),
                    tied=tuple(
                        TiedWeight(*home, p.nbytes, p.requires_grad) for p, home in found.items() if home[0] < place
                    ),
                )
            )
        return facts

    def trace(self, size: int) -> Trace:
        """The model at a batch of ``size`` samples."""
        if size not in self._traces:
            self._traces[size] = self._traced(size)
        return self._traces[size]

    def output(self) -> object:
        """Specs in the structure of the model's output, at some batch size."""
        return self.trace(next(iter(self._traces), PROBES[0])).output

    def _traced(self, size: int) -> Trace:
        value: object = map_specs(lambda spec: _resized(spec, size), self._sample)
        skips: _Skips = {}
        calls: list[tuple[_Call, _Runs]] = []
        for place, (stashes, reads) in enumerate(self._declared):
            call = value, {key: skips[key] for key in reads}
            runs = self._run(place, call, None)
            calls.append((call, runs))
            value = runs[0].output
            names = [stashes[index] for index in runs[0].trace.stashed]
            skips |= dict(zip(names, runs[0].stashed.values(), strict=True))
        layers, firsts = zip(*self._with_gradients(calls), strict=True)
        return Trace(layers, firsts, value)

    def _with_gradients(self, calls: Sequence[tuple[_Call, _Runs]]) -> list[tuple[LayerTrace, LayerTrace]]:
        """Traces with the gradients that really arrive, of each layer among others and as the first of a partition."""
        traces: list[tuple[LayerTrace, LayerTrace]] = []
        arriving: tuple[bool, ...] | None = None
        skips: dict[SkipKey, bool] = {}
        for place, (call, full) in reversed(list(enumerate(calls))):
            value, read = call
            stashes, _ = self._declared[place]
            stashed = zip(full[0].trace.stashed, full[0].stashed.values(), strict=True)
            names = [stashes[index] for index, spec in stashed if spec is not None]
            mains = len(full[0].trace.outputs) - len(names)
            wanted = (*(arriving or (True,) * mains), *(skips.get(name, False) for name in names))
            run, first = full if all(wanted) else self._run(place, call, wanted)
            count = len(specs_in(value))
            arriving = run.gradients[:count]
            present = [key for key, spec in read.items() if spec is not None]
            # A later layer may have given one already.
            skips |= {
                key: here or skips.get(key, False) for key, here in zip(present, run.gradients[count:], strict=True)
            }
            traces.append((run.trace, first.trace))
        return traces[::-1]

    def _run(self, place: int, call: _Call, wanted: tuple[bool, ...] | None) -> _Runs:
        """The run of a layer, and as the first of a partition, which takes no views; they matter where it writes."""
        views = [spec.view for spec in specs_in(call)]
        if not any(views):
            run = self._layer(place, call, wanted)
            return run, run
        first = self._layer(place, map_specs(lambda spec: replace(spec, view=False), call), wanted)
        if not any(views[at] for at in first.trace.writes):
            return _passing_on(first, views), first
        places = iter(range(len(views)))
        written = map_specs(lambda spec: replace(spec, view=next(places) in first.trace.writes and spec.view), call)
        return self._layer(place, written, wanted), first

    def _layer(self, place: int, call: _Call, wanted: tuple[bool, ...] | None) -> LayerRun:
        value, read = call
        key = self._kinds[place], _hashable(value), tuple(read.values()), wanted
        if key not in self._runs:
            with _explained(f"layer {place} ({type(self.module[place]).__name__})", value):
                self._runs[key] = trace_layer(*self._arguments(place, call), wanted)
        self._asked[id(self._runs[key].trace)] = place, call, wanted
        return self._runs[key]

    def arguments(self, trace: LayerTrace) -> tuple[nn.Module, object, _Skips, tuple[bool, ...] | None]:
        """What a trace of a layer was made of: the arguments of :func:`trace_layer`."""
        place, call, wanted = self._asked[id(trace)]
        return *self._arguments(place, call), wanted

    def _arguments(self, place: int, call: _Call) -> tuple[nn.Module, object, _Skips]:
        """The layer on the meta device with its inputs, under its own names of skips."""
        kind, own = self._kinds[place], self.module[place]
        if kind not in self._twins:
            self._twins[kind] = own if self._owned else meta_twin(own)
        twin = self._twins[kind]
        value, read = call
        _, theirs = declared_skips(twin)
        return twin, value, dict(zip(theirs, read.values(), strict=True))


class _Loss(nn.Module):
    def __init__(self, function: Callable[..., Tensor], target: TensorSpec) -> None:
        super().__init__()
        self.function, self.target = function, target

    def forward(self, output: object) -> Tensor:
        return self.function(output, self.target.empty())


def trace_loss(function: Callable[..., Tensor], output: object, target: Tensor) -> LayerTrace:
    """Trace a loss as if it were a layer.

    Args:
        function: (output, target) -> scalar.
        output: specs in the structure of the model's output, for any number of samples.
        target: for a whole mini-batch, on any device.
    """
    resized = map_specs(lambda spec: replace(_resized(spec, len(target)), requires_grad=spec.requires_grad), output)
    with _explained("loss", (resized, TensorSpec.of(target))):
        trace = trace_layer(_Loss(function, TensorSpec.of(target)), resized, {})
    sizes = [spec.shape for spec in specs_in(trace.output)]
    if len(sizes) != 1 or prod(sizes[0]) != 1:
        raise TraceError(
            f"loss must give one number, got tensors of shape {list(map(list, sizes))}; take its mean or sum"
        )
    return trace.trace


def _passing_on(run: LayerRun, views: Sequence[bool]) -> LayerRun:
    """The run of a layer that does not write to its inputs; those that it hands on are views as they came."""
    ports = iter(run.trace.outputs)

    def handed_on(spec: TensorSpec) -> TensorSpec:
        block = next(ports).block
        return replace(spec, view=views[block]) if 0 <= block < run.trace.inputs else spec

    output, stashed = map_specs(handed_on, (run.output, run.stashed))
    return replace(run, output=output, stashed=stashed)


@contextmanager
def _explained(what: str, value: object = ()) -> Iterator[None]:
    """Say of whatever goes wrong inside which layer it was, and what came to it."""
    try:
        yield
    except Exception as error:
        shapes = ", ".join(f"{list(spec.shape)} of {spec.dtype}" for spec in specs_in(value))
        raise TraceError(
            f"{what} must run on tensors without values"
            + (f", here of shape {shapes}" if shapes else "")
            + f", got {type(error).__name__}: {' '.join(str(error).split())[:300]}; {_advice(str(error))}"
        ) from error


def _advice(error: str) -> str:
    if "Meta kernel" in error:
        return "PyTorch cannot say what this operator gives without computing it: simulate another one in its place"
    if "more than 1 value per channel" in error:
        return "take fewer chunks, so that a micro-batch has more than one sample"
    return "check the shape of the sample, and let no step depend on the values of a tensor"


def _cast(module: nn.Sequential, precision: str, *, owned: bool) -> nn.Sequential:
    """The layers on the meta device in a half; copies, unless they are ``owned``."""
    known: dict[int, Any] = {}
    layers = []
    for place, layer in enumerate(module):
        with _explained(f"layer {place} ({type(layer).__name__})"):
            twin = layer if owned else meta_twin(layer, known)
            layers.append(twin.half() if precision == "float16" else twin.bfloat16())
    return nn.Sequential(*layers)


def _resized(spec: TensorSpec, size: int) -> TensorSpec:
    return TensorSpec.of(torch.empty((size, *spec.shape[1:]), dtype=spec.dtype, device="meta"))


def _hashable(value: object) -> Hashable:
    if isinstance(value, tuple | list):
        return type(value), tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    return value if isinstance(value, Hashable) else id(value)


def signature(layer: nn.Module) -> Hashable:
    """What the trace of a layer depends on, its inputs aside; valid while the layer lives.

    Two layers have one signature if they are of one class and agree in every attribute, in the shapes of parameters and
    buffers, in what is trained, and in the layers inside. An attribute without a plain form counts by identity.
    """
    order = {id(parameter): number for number, parameter in enumerate(layer.parameters())}
    return _of_module(layer, order)


def _of_module(module: nn.Module, order: dict[int, int]) -> Hashable:
    attributes = vars(module)
    told = (name for name, value in attributes.items() if name not in _SKIPPED and (name not in _HOOKS or value))
    return (
        type(module),
        tuple((name, _of_value(attributes[name])) for name in sorted(told)),
        tuple(
            (name, None if value is None else (order[id(value)], _of_tensor(value)))
            for name, value in attributes["_parameters"].items()
        ),
        tuple((name, None if value is None else _of_tensor(value)) for name, value in attributes["_buffers"].items()),
        tuple(
            (name, None if value is None else _of_module(value, order))
            for name, value in attributes["_modules"].items()
        ),
    )


def _of_tensor(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _of_value(value: object) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(_of_value(item) for item in value)
    if isinstance(value, set | frozenset) and all(isinstance(item, str) for item in value):
        return type(value), tuple(sorted(value))
    if isinstance(value, dict):
        return type(value), tuple((_of_value(key), _of_value(item)) for key, item in value.items())
    return id(value)
