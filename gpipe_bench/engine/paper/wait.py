"""Wait: a compute stream waits for the copy of its inputs, or a copy stream for the computation of its tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from gpipe_bench.engine.microbatch import Values
from gpipe_bench.engine.nodes import apply, pass_through
from gpipe_bench.engine.streams import Stream, use_stream, wait_stream

__all__ = ["wait"]


class Wait(Function):
    """(waiter, awaited, values...) -> values.

    Backward the streams change places, and autograd itself makes the one wait for the other: for every defined gradient
    the stream of the node that takes it waits for the stream of the node that gave it (pytorch#151079, since 2.8).
    """

    @staticmethod
    def forward(ctx: Any, waiter: Stream, awaited: Stream, *values: Any) -> tuple[Any, ...]:
        wait_stream(waiter, awaited)
        return pass_through(ctx, values, ctx.needs_input_grad[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *grads)


def wait(waiter: Stream, awaited: Stream, values: Values, current: Stream) -> Values:
    """Make ``waiter`` wait for ``awaited``, now and, in mirror image, in the backward pass of ``values``.

    Args:
        waiter: the stream that waits.
        awaited: the stream that it waits for.
        values: what is passed on.
        current: the copy stream among the two, current while the node is made: so in the backward pass the compute
            stream waits for no gradient that is still on its way, and can recompute.
    """
    with use_stream(current):
        passed: Values = apply(Wait, waiter, awaited, *values)
    return passed
