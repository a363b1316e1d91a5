"""Traces at every batch size from traces at three: what grows linearly with the samples needs no other.

The first two sizes give constant and slope of every integer in a trace, the third one checks them all. A layer whose
steps differ between the sizes, or whose numbers do not lie on one line, has no scalable trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from gpipe_bench.simulator.tracing.steps import Alloc, Free, Kernel, LayerTrace, Port, Step

__all__ = ["PROBES", "ScalableTrace", "decode_trace", "encode_trace", "fit_line"]

PROBES: Final = (4, 6, 4098)
"""Batch sizes that are traced; even ones, since some layers halve the batch, and one that is larger than the parts into
which others cut it."""

_VARIABLE: Final = ("flop", "bytes_read", "bytes_written", "workspace")


@dataclass(frozen=True, slots=True)
class ScalableTrace:
    """A trace at the first probe, and by how much each of its numbers grows per sample."""

    base: LayerTrace
    slopes: tuple[int, ...]

    def at(self, size: int) -> LayerTrace:
        """The trace for a micro-batch of ``size`` samples."""
        more = size - PROBES[0]
        moved = iter(number + slope * more for number, slope in zip(_numbers(self.base), self.slopes, strict=True))
        return _with_numbers(self.base, moved)


def fit_line(traces: Sequence[LayerTrace]) -> ScalableTrace | None:
    """The scalable trace through traces at :data:`PROBES`; None if no line goes through all of them."""
    low, high, check = traces
    numbers = [list(_numbers(trace)) for trace in traces]
    if len({len(row) for row in numbers}) > 1:
        return None
    rises = [(after - before, PROBES[1] - PROBES[0]) for before, after in zip(numbers[0], numbers[1], strict=True)]
    if any(rise % run for rise, run in rises):
        return None
    line = ScalableTrace(low, tuple(rise // run for rise, run in rises))
    return line if line.at(PROBES[1]) == high and line.at(PROBES[2]) == check else None


def _numbers(trace: LayerTrace) -> Iterator[int]:
    for port in (*trace.outputs, *trace.plain_outputs):
        yield port.bytes
    for step in (*trace.forward, *trace.plain, *trace.backward):
        if isinstance(step, Kernel):
            yield from (step.flop, step.bytes_read, step.bytes_written, step.workspace)
        elif isinstance(step, Alloc):
            yield step.bytes


def _with_numbers(trace: LayerTrace, numbers: Iterator[int]) -> LayerTrace:
    def step(old: Step) -> Step:
        if isinstance(old, Kernel):
            flop, read, written, workspace = (next(numbers) for _ in _VARIABLE)
            return Kernel(
                old.op, old.kernel_class, old.arithmetic, old.dtype, old.launches, flop, read, written, workspace
            )
        return Alloc(old.block, next(numbers)) if isinstance(old, Alloc) else old

    # In the order of _numbers.
    outputs = tuple(Port(port.block, next(numbers)) for port in trace.outputs)
    plain_outputs = tuple(Port(port.block, next(numbers)) for port in trace.plain_outputs)
    forward = tuple(step(old) for old in trace.forward)
    plain = tuple(step(old) for old in trace.plain)
    backward = tuple(step(old) for old in trace.backward)
    return replace(trace, outputs=outputs, plain_outputs=plain_outputs, forward=forward, plain=plain, backward=backward)


def encode_trace(trace: LayerTrace) -> dict[str, Any]:
    """A trace as JSON values."""
    encoded: dict[str, Any] = {field.name: getattr(trace, field.name) for field in fields(LayerTrace)}
    for name in ("outputs", "plain_outputs"):
        encoded[name] = [[port.block, port.bytes] for port in encoded[name]]
    for name in ("forward", "plain", "backward"):
        encoded[name] = [_encode_step(step) for step in encoded[name]]
    return encoded


def decode_trace(encoded: dict[str, Any]) -> LayerTrace:
    """What :func:`encode_trace` made."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in encoded.items()}
    for name in ("outputs", "plain_outputs"):
        values[name] = tuple(Port(*port) for port in values[name])
    for name in ("forward", "plain", "backward"):
        values[name] = tuple(_decode_step(step) for step in values[name])
    return LayerTrace(**values)


def _encode_step(step: Step) -> list[Any]:
    if isinstance(step, Kernel):
        return list(step)
    if isinstance(step, Alloc):
        return [step.block, step.bytes]
    return [step.block, 0, 1 + step.view] if step.gradient else [step.block]


def _decode_step(encoded: list[Any]) -> Step:
    """What :func:`_encode_step` made: a kernel has many numbers, an allocation two, a free one or three."""
    if len(encoded) == len(Kernel._fields):
        return Kernel(*encoded)
    if len(encoded) == 2:
        return Alloc(*encoded)
    block, *added = encoded
    return Free(block, bool(added), view=added == [0, 2])
