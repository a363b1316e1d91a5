"""Layers whose times were measured, in the place of traced ones: a pass of a layer is one kernel of known time.

Blocks of a trace are its input, its output, what else the graph keeps, and the gradients of input, output and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, NoReturn

from gpipe_bench.errors import ConfigError
from gpipe_bench.kernels.kernel import (
    NO_BLOCK,
    Alloc,
    Free,
    Kernel,
    LayerFacts,
    LayerTrace,
    Parameter,
    Port,
    SplitLayers,
    SplitTrace,
    Step,
)
from gpipe_bench.models.measured import MeasuredLayer
from gpipe_bench.settings import HALVES
from gpipe_bench.simulator.workloads.sources import ModelSource

_INPUT, _OUTPUT, _REST, _INPUT_GRADIENT, _OUTPUT_GRADIENT, _WEIGHT_GRADIENT = range(6)
_MIB: Final = 2**20


def _no_tracer() -> NoReturn:
    raise AssertionError("layers that were measured are not traced")


class MeasuredSource(ModelSource):
    """The traces of layers that were measured, for micro-batches of the size that was measured.

    Args:
        layers: whose values are right.
        precision: of the parameters.
    """

    def __init__(self, layers: Sequence[MeasuredLayer], *, precision: str = "float32") -> None:
        super().__init__(_no_tracer, (0,), precision=precision)
        self._measured = layers
        self._size = layers[0].samples

    @cached_property
    def facts(self) -> list[LayerFacts]:
        """Parameters of each layer, of one size, and its buffers as one tensor."""
        dtype, size = (self.precision, 2) if self.precision in HALVES else ("float32", 4)
        found = []
        for layer in self._measured:
            count, others = layer.parameters or 1, _bytes(layer.buffer_mib)
            trained = _bytes(layer.parameter_mib) // count
            parameters = (Parameter(trained // size, dtype, trained),) * count if trained else ()
            found.append(LayerFacts(parameters, (others,) if others else (), (), ()))
        return found

    def splits(self, size: int, span: slice) -> SplitLayers:
        """I and W of a partition's layers."""
        traces, layers = self.partition(size, span), self._measured[span]
        return lambda at: _split(layers[at], traces[at])

    def _at(self, size: int) -> tuple[tuple[LayerTrace, ...], tuple[LayerTrace, ...]]:
        self._size = self._size or size
        if size != self._size:
            rule = f"batch_size must give micro-batches of {self._size} samples, as the times of the layers are for"
            raise ConfigError([f"{rule}, got micro-batches of {size}; change batch_size or chunks"])
        if size not in self._traces:
            before = (None, *self._measured[:-1])
            pairs = [_traces(*pair) for pair in zip(before, self._measured, strict=True)]
            self._traces[size] = tuple(among for among, _ in pairs), tuple(first for _, first in pairs)
        return self._traces[size]


def _ns(ms: float) -> int:
    return round(ms * 1e6)


def _bytes(mib: float | None) -> int:
    return round((mib or 0) * _MIB)


def _keeps_output(layer: MeasuredLayer) -> bool:
    """Whether a layer is assumed to keep its output: it is, if what the layer keeps is at least as large."""
    return 0 < _bytes(layer.output_mib) <= _bytes(layer.activation_mib)


def _traces(before: MeasuredLayer | None, layer: MeasuredLayer) -> tuple[LayerTrace, LayerTrace]:
    """Two traces of a layer: as one among others, and as the first of its partition.

    The first of a partition gets a copy of its input, and holds it if the layer ``before`` keeps its output. The very
    first layer has none before it: its input needs no gradient.
    """
    output = _bytes(layer.output_mib)
    gradient = (Alloc(_INPUT_GRADIENT, _bytes(before.output_mib)),) if before else ()
    rest = _bytes(layer.activation_mib) - output * _keeps_output(layer)
    forward = Kernel.measured(_ns(layer.forward_ms))
    makes = Alloc(_OUTPUT, output)
    kept = ((_OUTPUT,) if _keeps_output(layer) else ()) + ((_REST,) if rest else ())
    ports = (Port(_OUTPUT, output),)

    def trace(kept: tuple[int, ...]) -> LayerTrace:
        return LayerTrace(
            inputs=1, outputs=ports, plain_outputs=ports, stashed=(), read=(),
            forward=(forward, makes, *((Alloc(_REST, rest),) if rest else ())), plain=(forward, makes), kept=kept,
            backward=(*gradient, Kernel.measured(_ns(layer.backward_ms)), *_weights(layer)),
            output_gradients=(_OUTPUT_GRADIENT,),
            input_gradients=(_INPUT_GRADIENT if before else NO_BLOCK,),
            nodes=1, views=(False,), fits=(True,), needs=(before is not None,),
        )  # fmt: skip

    among = trace(kept)
    return among, trace((_INPUT, *kept)) if before and _keeps_output(before) else among


def _split(layer: MeasuredLayer, trace: LayerTrace) -> SplitTrace:
    """The parts of a backward pass; without their times each takes half. All that the graph keeps stays for W."""
    whole_ns, half_ms = _ns(layer.backward_ms), layer.backward_ms / 2
    weights_ns = _ns(half_ms if layer.backward_weights_ms is None else layer.backward_weights_ms)
    gradient = [step for step in trace.backward if isinstance(step, Alloc) and step.block == _INPUT_GRADIENT]
    return SplitTrace(
        inputs=(*gradient, Kernel.measured(whole_ns - weights_ns)),
        weights=(Kernel.measured(weights_ns), *_weights(layer)),
        kept=(*trace.kept, _OUTPUT_GRADIENT),
        output_gradients=trace.output_gradients,
        input_gradients=trace.input_gradients,
    )


def _weights(layer: MeasuredLayer) -> tuple[Step, ...]:
    nbytes = _bytes(layer.parameter_mib)
    return (Alloc(_WEIGHT_GRADIENT, nbytes), Free(_WEIGHT_GRADIENT, gradient=True)) if nbytes else ()
