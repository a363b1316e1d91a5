"""Applying autograd functions, and the rank of their nodes.

Among nodes that are ready, autograd runs the one with the highest sequence number first. Numbers count up in each
thread for itself, so nodes made by the calling thread and by workers compare by accident. Two rules make the order the
same in every step: workers are fresh threads in each forward pass, so their numbers start at zero; and the nodes
of the lanes between tasks, made by the calling thread, are numbered from :data:`LANE_RANK` on, above all of them.
In a long-lived process the published engine had the same relation without saying so.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor
from torch.autograd import Function

__all__ = ["LANE_RANK", "apply", "apply_lane", "set_rank"]

LANE_RANK: Final = 2**40
"""The lowest sequence number of a lane's node; no worker makes that many nodes in one forward pass."""

_ranks = itertools.count(LANE_RANK)


def apply(function: type[Function], *args: Any) -> tuple[Any, ...]:
    """Apply a function that returns a tuple; PyTorch leaves ``Function.apply`` without annotations."""
    outputs: tuple[Any, ...] = function.apply(*args)  # type: ignore[no-untyped-call]
    return outputs


def apply_lane(function: type[Function], *args: Any) -> tuple[Any, ...]:
    """Apply a function of a lane: its node outranks every task's, and lanes made before it."""
    outputs = apply(function, *args)
    set_rank(outputs, next(_ranks))
    return outputs


def set_rank(outputs: Sequence[Any], rank: int) -> None:
    """Give the node that made ``outputs`` a sequence number."""
    for output in outputs:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            # Absent before it was added to PyTorch; then the order is that of the counters.
            if hasattr(output.grad_fn, "_set_sequence_nr"):
                output.grad_fn._set_sequence_nr(rank)  # noqa: SLF001 - autograd's only handle on its order
            return
