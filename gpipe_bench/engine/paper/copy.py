"""Copy, Portal and Wait: tensors go to the device of another partition, and their gradients come back.

Both directions of a copy run on the copy streams that were current when the node was made: autograd runs a node on the
stream on which it was made, and makes that stream wait for every defined gradient (torchgpipe, arXiv 2004.09910,
section 3.2.2).

A portal takes a skip from the partition that stashes it to one that reads it, in one hop. torchgpipe (section 3.3)
moves the tensor outside the graph and leaves phonies in it. Here the graph has the tensor itself: a node from its stash
to its reader, past all partitions between. Without portals a skip rides in the tuple of its micro-batch through each of
these partitions.

Where several partitions read a skip, portals lead from one reader to the next, and each partition adds its gradient to
that of the later ones. If the tensor is already on the device of a reader, the node is a Return, which moves the
gradient alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from gpipe_bench.autograd.microbatch import Values
from gpipe_bench.autograd.nodes import apply, pass_through
from gpipe_bench.engine.transfer import Holding, Route, Stream, move, move_back, use_stream, wait_stream

__all__ = ["Portal", "copy", "wait"]


class Copy(Function):
    """(route, holding, values...) -> values on the target device."""

    @staticmethod
    def forward(ctx: Any, route: Route, holding: Holding, *values: Any) -> tuple[Any, ...]:
        ctx.route, ctx.holding = route, holding
        return pass_through(ctx, move(route, values), ctx.needs_input_grad[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *move_back(ctx.route, grads, ctx.holding))


class Portal(Copy):
    """The same for a skip."""


class Return(Portal):
    """(route, holding, here, value) -> here: the skip is on the target device already, and its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, route: Route, holding: Holding, *values: Any) -> tuple[Any, ...]:
        ctx.route, ctx.holding = route, holding
        return pass_through(ctx, values[:1], ctx.needs_input_grad[3:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, None, None, *move_back(ctx.route, grads, ctx.holding))


def copy(route: Route, holding: Holding, values: Values, node: type[Copy] = Copy) -> Values:
    """Move values, and the skips that ride along, along ``route``; what is no tensor stays as it is."""
    with use_stream(route.source.copying), use_stream(route.target.copying):
        moved: Values = apply(node, route, holding, *values)
    return moved


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

    ``current`` is the copy stream among the two, current while the node is made. So in the backward pass the compute
    stream waits for no gradient that is still on its way, and can recompute.
    """
    with use_stream(current):
        passed: Values = apply(Wait, waiter, awaited, *values)
    return passed
