"""Applying autograd functions, and the rank of their nodes.

Among nodes that are ready, autograd runs the one with the highest sequence number first. Numbers count up in each
thread for itself, so nodes made by the calling thread and by workers would compare by accident. While workers issue the
tasks, four rules make the order the same in every step, and that of the published engine, in which one fresh thread
issued all tasks of a device and the calling thread was old:

    2^40 ...     nodes of the lanes between tasks, made by the calling thread
    m n ...      nodes of tasks without checkpoint: worker threads are fresh, so they count from zero, and skip what
                 the checkpoints need
    0 ... m n-1  checkpoints, in the order of the clock-cycles

When the calling thread issues every task, its own counter does the same and nothing is ranked.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function, Variable
from torch.autograd.function import FunctionCtx

from gpipe_bench.engine.phony import new_leaf

__all__ = ["LANE_RANK", "apply", "apply_lane", "pass_through", "ranked_lanes", "run_backward", "set_rank", "skip_ranks"]

LANE_RANK: Final = 2**40
"""The lowest sequence number of a lane's node; no worker makes that many nodes in one forward pass."""

_ranks = itertools.count(LANE_RANK)


class _State(threading.local):
    ranked = False


_state = _State()


@contextmanager
def ranked_lanes() -> Iterator[None]:
    """Rank the lanes that this thread makes in the block above every task."""
    _state.ranked = True
    try:
        yield
    finally:
        _state.ranked = False


def apply(function: type[Function], *args: Any) -> tuple[Any, ...]:
    """Apply a function that returns a tuple; PyTorch leaves ``Function.apply`` without annotations."""
    outputs: tuple[Any, ...] = function.apply(*args)  # type: ignore[no-untyped-call]  # see above
    return outputs


def apply_lane(function: type[Function], *args: Any) -> tuple[Any, ...]:
    """Apply a function of a lane: among ranked lanes its node outranks those made before it."""
    outputs = apply(function, *args)
    if _state.ranked:
        set_rank(outputs, next(_ranks))
    return outputs


def pass_through(ctx: FunctionCtx, values: Sequence[Any]) -> tuple[Any, ...]:
    """What the forward of an identity function returns: ``values``, its tensors detached.

    A function that returns its input as it is breaks autograd functions in the user's model. A gradient that is None
    reaches ``backward`` as None: zeros would be computed, and would make autograd synchronise streams.
    """
    ctx.set_materialize_grads(False)
    return tuple(value.detach() if isinstance(value, Tensor) else value for value in values)


def run_backward(roots: Sequence[Any], grads: Sequence[Tensor | None]) -> None:
    """Run backward from those of ``roots`` that are not None and have a gradient; one without counts as zero.

    Args:
        roots: tensors with a graph, or edges into one.
        grads: one for each, of its shape.
    """
    pairs = [(root, grad) for root, grad in zip(roots, grads, strict=True) if root is not None and grad is not None]
    if pairs:
        some, theirs = zip(*pairs, strict=True)
        # What torch.autograd.backward() calls, without its checks of shapes, which the engine makes again: they would
        # take as long as the backward pass of a small task.
        Variable._execution_engine.run_backward(  # noqa: SLF001 - see above
            some, theirs, False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def set_rank(outputs: Sequence[Any], rank: int) -> None:
    """Give the node that made ``outputs`` a sequence number."""
    for output in outputs:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            # Absent before it was added to PyTorch; then the order is that of the counters.
            if hasattr(output.grad_fn, "_set_sequence_nr"):
                output.grad_fn._set_sequence_nr(rank)  # noqa: SLF001 - autograd's only handle on its order
            return


def skip_ranks(count: int) -> None:
    """Leave the sequence numbers below ``count`` of this thread unused: there is no way but to use them up."""
    if torch.is_grad_enabled():
        phony = new_leaf(torch.device("cpu"))
        number = -1
        while number < count - 1:
            node: Any = phony.view_as(phony).grad_fn
            number = node._sequence_nr()  # noqa: SLF001 - autograd's only word on its order
