"""Where traces come from: a module that is traced now, or a model of the suite whose traces are kept on disk.

A micro-batch of one sample is traced as it is, since a dimension of size 1 changes which operations run; the others
come from a line through three traces, where there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.collection import no_collection
from gpipe_bench.models.classification import cross_entropy
from gpipe_bench.simulator.tracing.precision import HALVES, in_precision
from gpipe_bench.simulator.tracing.scaling import PROBES, fit_line
from gpipe_bench.simulator.tracing.steps import LayerFacts, LayerTrace
from gpipe_bench.simulator.tracing.trace_cache import Shelf, StoredTraces, default_folder
from gpipe_bench.simulator.workloads.composed import Composed
from gpipe_bench.simulator.workloads.split import SplitLayers

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gpipe_bench.simulator.tracing.model_trace import Tracer
    from gpipe_bench.simulator.tracing.split_trace import SplitTracer

__all__ = ["ModelSource", "model_of_suite", "module_source", "resnet101_source"]

_Pair = tuple[LayerTrace, LayerTrace]
"""Traces of a layer: among others, and as the first of a partition."""

_SCALABLE: Final = 0


class ModelSource:
    """Traces of one model.

    Args:
        tracer: makes the tracer when the first trace is needed.
        sample_bytes: of each tensor that enters, per sample.
        loss: (output, target) -> scalar, or None.
        target: batch size -> targets.
        shelf: where traces are kept, if they are.
        precision: what the traces are in; an attribute, too.

    Attributes:
        composed: what partitions were made of them.
    """

    def __init__(
        self,
        tracer: Callable[[], Tracer],
        sample_bytes: tuple[int, ...],
        loss: Callable[..., Tensor] | None = None,
        target: Callable[[int], Tensor] | None = None,
        *,
        shelf: Shelf | None = None,
        precision: str = "float32",
    ) -> None:
        self._make, self._shelf = tracer, shelf
        self.precision = precision
        self._tracer: Tracer | None = None
        self._bytes = sample_bytes
        self._loss, self._target = loss, target
        self._known: StoredTraces | None = None
        self._losses: dict[int, LayerTrace] = {}
        self._evaluated: dict[int, list[_Pair]] = {}
        self._splits: SplitTracer | None = None
        self.composed = Composed()

    def input_bytes(self, size: int) -> tuple[int, ...]:
        """Bytes of each tensor that enters with ``size`` samples."""
        return tuple(size * nbytes for nbytes in self._bytes)

    def facts(self) -> list[LayerFacts]:
        """Parameters, buffers and skips of each layer."""
        return self._stored().facts

    def layers(self, size: int) -> list[LayerTrace]:
        """The trace of each layer for a micro-batch of ``size`` samples."""
        return [among for among, _ in self._pairs(size)]

    def partition(self, size: int, span: slice) -> list[LayerTrace]:
        """The traces of a partition's layers: no view comes to the first, nor to those to which it hands that on."""
        pairs = zip(self._pairs(size)[span], self._firsts(size, span), strict=True)
        return [first if entered else among for (among, first), entered in pairs]

    def _firsts(self, size: int, span: slice) -> list[bool]:
        """Which layers of a partition get no views."""
        found = [True]
        for _, first in self._pairs(size)[span]:
            found.append(found[-1] and all(port.block < first.inputs for port in first.outputs))
        return found[:-1]

    def splits(self, size: int, span: slice) -> SplitLayers:
        """I and W of a partition's layers, which are traced when they are asked for, and kept in memory alone."""
        from gpipe_bench.simulator.tracing.split_trace import SplitTracer

        if self._splits is None:
            self._splits = SplitTracer(self._tracing())
        tracer, firsts = self._splits, self._firsts(size, span)
        return lambda at, held: tracer.split(size, span.start + at, held, first=firsts[at])

    def loss(self, batch_size: int) -> LayerTrace | None:
        """The trace of the loss of a mini-batch."""
        if self._loss is None or self._target is None:
            return None
        if batch_size not in self._losses:
            found = None if self._shelf is None else self._shelf.load_loss(batch_size)
            if found is None:
                from gpipe_bench.simulator.tracing.model_trace import trace_loss

                target = in_precision(self._target(batch_size), self.precision)
                found = trace_loss(self._loss, self._output(self._stored()), target)
                if self._shelf is not None:
                    self._shelf.store_loss(batch_size, found)
            self._losses[batch_size] = found
        return self._losses[batch_size]

    def _output(self, stored: StoredTraces) -> object:
        """Specs of the model's output at some size."""
        from gpipe_bench.simulator.tracing.specs import TensorSpec

        if stored.output is None:
            encoded = stored.encoded_output
            stored.output = self._tracing().trace(PROBES[0]).output if encoded is None else TensorSpec.decoded(encoded)
        return stored.output

    def _pairs(self, size: int) -> list[_Pair]:
        if size not in self._evaluated:
            stored = self._stored()
            if size > 1 and _SCALABLE not in stored.layers:
                self._scale(stored)
            lines = stored.scalable if size > 1 else None
            if lines is None and size not in stored.exact:
                trace = self._tracing().trace(size)
                stored.output = trace.output
                stored.exact[size], stored.layers[size] = trace.kinds, trace.places
                self._keep(stored)
            kinds = list(stored.exact[size]) if lines is None else [kind.at(size) for kind in lines]
            places = stored.layers[size if lines is None else _SCALABLE]
            self._evaluated[size] = [(kinds[among], kinds[first]) for among, first in places]
        return self._evaluated[size]

    def _scale(self, stored: StoredTraces) -> None:
        """Try to find a line; whether there is one is known from then on."""
        stored.layers[_SCALABLE] = ()
        try:
            traces = [self._tracing().trace(size) for size in PROBES]
        except (RuntimeError, ValueError):
            # The model does not take these sizes: each size is traced when it is needed, and says what is wrong.
            traces = []
        if traces and len({trace.places for trace in traces}) == 1:
            lines = [fit_line(kinds) for kinds in zip(*(trace.kinds for trace in traces), strict=True)]
            scalable = tuple(line for line in lines if line is not None)
            if len(scalable) == len(lines):
                stored.scalable, stored.layers[_SCALABLE] = scalable, traces[0].places
            stored.output = traces[0].output
        self._keep(stored)

    def _tracing(self) -> Tracer:
        if self._tracer is None:
            self._tracer = self._make()
        return self._tracer

    def _stored(self) -> StoredTraces:
        if self._known is None:
            found = None if self._shelf is None else self._shelf.load()
            self._known = found or StoredTraces(self._tracing().facts())
        return self._known

    def _keep(self, stored: StoredTraces) -> None:
        if self._shelf is not None:
            self._shelf.store(stored)


def module_source(
    module: nn.Sequential,
    sample: Tensor | tuple[Tensor, ...],
    loss: Callable[..., Tensor] | None = None,
    target: Callable[[int], Tensor] | None = None,
    *,
    precision: str = "float32",
) -> ModelSource:
    """Traces of a module, kept in memory."""
    tensors = [in_precision(tensor, precision) for tensor in (sample if isinstance(sample, tuple) else (sample,))]
    nbytes = tuple(tensor.nbytes // len(tensor) for tensor in tensors)

    def tracer() -> Tracer:
        from gpipe_bench.simulator.tracing.model_trace import Tracer

        return Tracer(module, sample, precision=precision)

    return ModelSource(tracer, nbytes, loss, target, precision=precision)


def resnet101_source(folder: Path | None = None) -> ModelSource:
    """Traces of ResNet-101, which only the fit and the predictions need, kept as those of the suite's models are."""
    return _resnet101_source(default_folder() if folder is None else folder)


@cache
def _resnet101_source(folder: Path) -> ModelSource:
    def build() -> nn.Sequential:
        from gpipe_bench.models.resnet import resnet101

        return resnet101()

    def target(size: int) -> Tensor:
        import torch

        return torch.empty(size, dtype=torch.int64, device="meta")

    key = {"model": "resnet101", "arguments": ""}
    return _stored_source(key, build, ((3, 224, 224), "float32"), (cross_entropy, target), folder)


def model_of_suite(
    name: str, given: Mapping[str, Any], folder: Path | None = None, *, precision: str = "float32"
) -> ModelSource:
    """Traces of a model of the suite, kept in ``folder``, by default in the user's cache folder.

    Raises:
        ConfigError: there is no such model, or its arguments are wrong.
    """
    from gpipe_bench.models.table import check_arguments, format_arguments, model_digest

    text = format_arguments(check_arguments(name, given))
    return _suite_source(name, text, model_digest(name), default_folder() if folder is None else folder, precision)


@cache
def _suite_source(name: str, text: str, digest: str, folder: Path, precision: str) -> ModelSource:
    """Traces of a model; ``digest``: of the files of a model of the user's own."""
    from gpipe_bench.models.table import model_spec, parse_arguments

    spec, arguments = model_spec(name), parse_arguments(name, text)

    def target(size: int) -> Tensor:
        # Its shape is all that counts.
        return spec.make_batch(size, arguments, device="meta")[1]

    entering = spec.input_shape(arguments), spec.input_type(arguments)
    key = {"model": name, "arguments": text, **({"files": digest} if digest else {})}
    build = partial(spec.build, **arguments)
    return _stored_source(key, build, entering, (spec.loss, target), folder, precision=precision)


def _stored_source(
    key: Mapping[str, str],
    build: Callable[[], nn.Sequential],
    entering: tuple[tuple[int, ...], str],
    loss: tuple[Callable[[Tensor, Tensor], Tensor], Callable[[int], Tensor]],
    folder: Path,
    *,
    precision: str = "float32",
) -> ModelSource:
    """Traces that are kept under ``key``; PyTorch is loaded only when something has to be traced.

    Args:
        key: what they depend on, code of the suite aside.
        build: makes the model.
        entering: shape and type of one sample.
        loss: loss function, and batch size -> targets.
        folder: where they are kept.
        precision: what to trace the model in.
    """
    shape, kind = entering

    def tracer() -> Tracer:
        import torch

        from gpipe_bench.simulator.tracing.model_trace import Tracer

        with no_collection():
            with torch.device("meta"):
                module = build()
            # A function of the user's own may make tensors elsewhere, or give the same module twice.
            owned = "files" not in key
            sample = torch.empty(1, *shape, dtype=getattr(torch, kind), device="meta")
            return Tracer(module, sample, owned=owned, precision=precision)

    half = precision in HALVES
    nbytes = (prod(shape) * _bytes_of(precision if half and "float" in kind else kind),)
    shelf = Shelf(folder, {**key, "precision": precision} if half else key)
    return ModelSource(tracer, nbytes, *loss, shelf=shelf, precision=precision)


def _bytes_of(kind: str) -> int:
    """Bytes of one value of a type, such as ``int64`` or ``bool``."""
    bits = re.search(r"\d+", kind)
    return 1 if bits is None else int(bits[0]) // 8
