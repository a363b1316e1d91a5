"""Where traces come from: a module that is traced now, or a model of the suite whose traces are kept on disk.

A micro-batch of one sample is traced as it is, since a dimension of size 1 changes which operations run; the others
come from a line through three traces, where there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpipe_bench.kernels.kernel import LayerFacts, LayerTrace, SplitLayers, SplitTrace
from gpipe_bench.kernels.precision import in_precision
from gpipe_bench.models.arguments import read_text
from gpipe_bench.models.table import check_arguments, format_arguments, model_digest, model_spec
from gpipe_bench.settings import HALVES
from gpipe_bench.simulator.tracing.scaling import PROBES, ScalableTrace, fit_line
from gpipe_bench.simulator.tracing.trace_cache import default_folder, kept
from gpipe_bench.util.garbage import no_collection

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gpipe_bench.simulator.tracing.model_trace import Tracer

T = TypeVar("T")

_Traces = tuple[tuple[LayerTrace, ...], tuple[LayerTrace, ...]]
"""Traces of all layers: of each among others, and of each as the first of a partition."""

_Lines = tuple[tuple[ScalableTrace, ...], tuple[ScalableTrace, ...]]
"""The same at any batch size."""


class ModelSource:
    """Traces of one model.

    Args:
        tracer: makes the tracer when the first trace is needed.
        sample_bytes: of each tensor that enters, per sample.
        loss: (output, target) -> scalar, or None.
        target: batch size -> targets.
        folder: where traces are kept; None to keep them in memory alone.
        key: what names the model there.
        precision: what the traces are in; an attribute, too.
    """

    def __init__(
        self,
        tracer: Callable[[], Tracer],
        sample_bytes: tuple[int, ...],
        loss: Callable[..., Tensor] | None = None,
        target: Callable[[int], Tensor] | None = None,
        *,
        folder: Path | None = None,
        key: Mapping[str, str] | None = None,
        precision: str = "float32",
    ) -> None:
        self._make, self._folder, self._key = tracer, folder, key or {}
        self.precision = precision
        self._bytes = sample_bytes
        self._loss, self._target = loss, target
        self._losses: dict[int, LayerTrace] = {}
        self._traces: dict[int, _Traces] = {}
        self._splits: dict[int, SplitTrace] = {}

    def input_bytes(self, size: int) -> tuple[int, ...]:
        """Bytes of each tensor that enters with ``size`` samples."""
        return tuple(size * nbytes for nbytes in self._bytes)

    @cached_property
    def facts(self) -> list[LayerFacts]:
        """Parameters, buffers and skips of each layer."""
        return self._kept(lambda: self._tracer.facts(), part="facts")  # noqa: PLW0108 - stored ones need no tracer

    def layers(self, size: int) -> tuple[LayerTrace, ...]:
        """The trace of each layer for a micro-batch of ``size`` samples."""
        return self._at(size)[0]

    def partition(self, size: int, span: slice) -> list[LayerTrace]:
        """The traces of a partition's layers: no view comes to the first, nor to those to which it hands that on."""
        among, first = (traces[span] for traces in self._at(size))
        return [first[at] if entered else among[at] for at, entered in enumerate(self._entered(size, span))]

    def _entered(self, size: int, span: slice) -> list[bool]:
        """Which layers of a partition get no views."""
        found = [True]
        for first in self._at(size)[1][span]:
            found.append(found[-1] and all(port.block < first.inputs and not port.view for port in first.outputs))
        return found[:-1]

    def splits(self, size: int, span: slice) -> SplitLayers:
        """I and W of a partition's layers, which are traced when they are asked for, and kept in memory alone."""
        from gpipe_bench.simulator.tracing.layer_trace import trace_split

        # What is on disk does not say what it was made of.
        with self._usual_modes():
            trace = self._tracer.trace(size)
        entered = self._entered(size, span)

        def split(at: int) -> SplitTrace:
            layer = (trace.firsts if entered[at] else trace.layers)[span.start + at]
            if id(layer) not in self._splits:
                with self._usual_modes():
                    self._splits[id(layer)] = trace_split(*self._tracer.arguments(layer))
            return self._splits[id(layer)]

        return split

    def loss(self, batch_size: int) -> LayerTrace | None:
        """The trace of the loss of a mini-batch."""
        function, target = self._loss, self._target
        if function is None or target is None:
            return None

        def trace() -> LayerTrace:
            from gpipe_bench.simulator.tracing.model_trace import trace_loss

            return trace_loss(function, self._tracer.output(), in_precision(target(batch_size), self.precision))

        if batch_size not in self._losses:
            self._losses[batch_size] = self._kept(trace, loss=batch_size)
        return self._losses[batch_size]

    def _at(self, size: int) -> _Traces:
        if size not in self._traces:
            lines = self._lines if size > 1 else None
            if lines is None:
                self._traces[size] = self._kept(partial(self._trace, size), size=size)
            else:
                self._traces[size] = _each(lambda line: line.at(size), lines)
        return self._traces[size]

    def _trace(self, size: int) -> _Traces:
        trace = self._tracer.trace(size)
        return trace.layers, trace.firsts

    @cached_property
    def _tracer(self) -> Tracer:
        return self._make()

    @cached_property
    def _lines(self) -> _Lines | None:
        return self._kept(self._fit, part="lines")

    def _fit(self) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
        """Traces at any size; None if there is a layer through whose traces no line goes."""
        try:
            probes = [self._trace(size) for size in PROBES]
        except (RuntimeError, ValueError):
            # The model does not take these sizes: each size is traced when it is needed, and says what is wrong.
            return None
        lines = _each(lambda *traces: fit_line(traces), *probes)
        return lines if all(line is not None for part in lines for line in part) else None

    def _kept(self, make: Callable[[], T], **part: str | int) -> T:
        def made() -> T:
            with self._usual_modes():
                return make()

        return kept(self._folder, {**self._key, **part}, made)

    @contextmanager
    def _usual_modes(self) -> Iterator[None]:
        """Trace with gradients, whatever the caller does; models by name in float32, as a process of their own has."""
        import torch

        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32 if self._key else before)
        try:
            with torch.inference_mode(mode=False), torch.enable_grad():
                yield
        finally:
            torch.set_default_dtype(before)


def _each(function: Callable[..., T], *traces: tuple[tuple[Any, ...], ...]) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """Call a function with the first items of all traces, then with the second ones, and so on; once for the same."""
    known: dict[tuple[int, ...], T] = {}

    def once(*items: Any) -> T:
        key = tuple(map(id, items))
        if key not in known:
            known[key] = function(*items)
        return known[key]

    layers, firsts = (tuple(map(once, *part)) for part in zip(*traces, strict=True))
    return layers, firsts


def module_source(
    module: nn.Sequential,
    sample: Tensor | tuple[Tensor, ...],
    loss: Callable[..., Tensor] | None = None,
    target: Tensor | None = None,
    *,
    precision: str = "float32",
) -> ModelSource:
    """Traces of a module, kept in memory; ``target``: with a loss, that of a whole mini-batch."""
    tensors = [in_precision(tensor, precision) for tensor in (sample if isinstance(sample, tuple) else (sample,))]
    nbytes = tuple(tensor.nbytes // len(tensor) for tensor in tensors)

    def tracer() -> Tracer:
        from gpipe_bench.simulator.tracing.model_trace import Tracer

        return Tracer(module, sample, precision=precision)

    return ModelSource(tracer, nbytes, loss, None if target is None else lambda _: target, precision=precision)


def model_of_suite(
    name: str, given: Mapping[str, Any], folder: Path | None = None, *, precision: str = "float32"
) -> ModelSource:
    """Traces of a model of the suite, kept in ``folder``, by default in the user's cache folder.

    Raises:
        ConfigError: there is no such model, or its arguments are wrong.
    """
    text = format_arguments(check_arguments(name, given))
    return _kept_source(name, text, model_digest(name), default_folder() if folder is None else folder, precision)


@cache
def _kept_source(name: str, text: str, digest: str, folder: Path, precision: str) -> ModelSource:
    """Traces of a model on disk; PyTorch is loaded only when something has to be traced.

    ``text`` has its arguments, ``digest`` is that of the files of a model of the user's own; for others it is empty.
    """
    spec = model_spec(name)
    arguments = spec.check(read_text(text)[0])
    shape, kind = spec.input_shape(arguments), spec.input_type(arguments)

    def tracer() -> Tracer:
        import torch

        from gpipe_bench.simulator.tracing.model_trace import Tracer

        with no_collection():
            with torch.device("meta"):
                module = spec.build(**arguments)
            sample = torch.empty(1, *shape, dtype=getattr(torch, kind), device="meta")
            # A function of the user's own may make tensors elsewhere, or give the same module twice.
            return Tracer(module, sample, owned=not digest, precision=precision)

    def target(size: int) -> Tensor:
        # Its shape is all that counts.
        return spec.make_batch(size, arguments, device="meta")[1]

    entering = precision if precision in HALVES and "float" in kind else kind
    key = {"model": name, "arguments": text, "files": digest, "precision": precision}
    nbytes = (prod(shape) * _bytes_of(entering),)
    return ModelSource(tracer, nbytes, spec.loss, target, folder=folder, key=key, precision=precision)


def _bytes_of(kind: str) -> int:
    """Bytes of one value of a type, such as ``int64`` or ``bool``."""
    bits = re.search(r"\d+", kind)
    return 1 if bits is None else int(bits[0]) // 8
