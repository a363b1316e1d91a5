"""Copy: a micro-batch goes to the device of the next partition, and its gradient comes back.

Both directions run on the copy streams that were current when the node was made: autograd runs a node on the stream on
which it was made, and makes that stream wait for every defined gradient (torchgpipe, arXiv 2004.09910, section 3.2.2).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from gpipe_bench.engine.holding import Holding
from gpipe_bench.engine.microbatch import Values
from gpipe_bench.engine.nodes import apply, pass_through
from gpipe_bench.engine.streams import use_stream
from gpipe_bench.engine.transfer import Route, move, move_back

__all__ = ["copy"]


class Copy(Function):
    """(route, holding, values...) -> values on the target device."""

    @staticmethod
    def forward(ctx: Any, route: Route, holding: Holding, *values: Any) -> tuple[Any, ...]:
        ctx.route, ctx.holding = route, holding
        return pass_through(ctx, move(route, values), ctx.needs_input_grad[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        route: Route = ctx.route
        moved = move_back(route, grads)
        if route.target.copying != route.target.computing:
            ctx.holding.keep(grads, route.target.copying)
        return (None, None, *moved)


def copy(route: Route, holding: Holding, values: Values) -> Values:
    """Move ``values`` along ``route``; what is no tensor stays as it is.

    Args:
        route: from where to where.
        holding: keeps gradients while they are copied.
        values: of a micro-batch, and the skips that ride along.
    """
    with use_stream(route.source.copying), use_stream(route.target.copying):
        moved: Values = apply(Copy, route, holding, *values)
    return moved
