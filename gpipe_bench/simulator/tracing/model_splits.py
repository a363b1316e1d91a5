"""Traces I and W of the layers of a model, each kind once and only when it is asked for."""

from __future__ import annotations

from gpipe_bench.simulator.tracing.model_trace import Trace, Tracer
from gpipe_bench.simulator.tracing.split_trace import trace_split
from gpipe_bench.simulator.tracing.steps import SplitTrace

__all__ = ["SplitTracer"]


class SplitTracer:
    """Traces the split backward passes of a model.

    Args:
        tracer: traces the model.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._traces: dict[int, Trace] = {}
        self._known: dict[tuple[int, tuple[bool, ...]], SplitTrace] = {}

    def split(self, size: int, place: int, held: tuple[bool, ...], *, first: bool) -> SplitTrace:
        """I and W of a layer.

        Args:
            size: samples.
            place: of the layer in the model.
            held: for each tensor that leaves the layer, whether W of a later layer keeps the nodes that made it.
            first: whether the layer is the first one of a partition.
        """
        if size not in self._traces:
            self._traces[size] = self._tracer.trace(size)
        trace = self._traces[size]
        layer = trace.kinds[(trace.firsts if first else trace.layers)[place]]
        key = id(layer), held
        if key not in self._known:
            self._known[key] = trace_split(*self._tracer.arguments(layer), held)
        return self._known[key]
