"""Where the graph of a task begins with ``backward='scheduled'``, and gradients of its inputs arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from gpipe_bench.engine.autograd import apply
from gpipe_bench.engine.microbatch import Values, differentiable, replace
from gpipe_bench.engine.outlet import Outlet, run_backward_from

__all__ = ["Inlet", "receive"]


class Inlet:
    """Where gradients of a task's inputs arrive, in the task's own backward pass and in no other.

    A tensor that a layer keeps aside, such as a loss of its own, is no output. Whoever runs backward from it comes here
    too, before the gradients of the outputs or after these were sent on, and his would be lost.

    Args:
        indices: of the inputs that need a gradient.
        count: of all inputs.
    """

    __slots__ = ("_count", "_grads", "_indices", "_open")

    def __init__(self, indices: Sequence[int], count: int) -> None:
        self._indices, self._count = indices, count
        self._open = False
        self._grads: Sequence[Tensor | None] | None = None

    def run_backward(self, outlet: Outlet, grads: list[Tensor | None]) -> None:
        """The task's backward pass, see :func:`gpipe_bench.engine.outlet.run_backward_from`."""
        self._open = True
        try:
            run_backward_from(outlet, grads)
        finally:
            self._open = False

    def take(self, grads: Sequence[Tensor | None]) -> None:
        """Take gradients, once.

        Raises:
            RuntimeError: they are not those of the task's own backward pass, or not all of them.
        """
        if not self._open or self._grads is not None:
            raise RuntimeError(
                "with backward='scheduled' gradients must come from the pipeline's outputs, got some from a tensor "
                "that a layer keeps aside, or that another layer has from there; return it as an output, or use "
                "backward='autograd' with checkpoint='never'"
            )
        self._grads = grads

    def grads(self) -> list[Tensor | None]:
        """Gradients of all inputs."""
        if self._grads is not None and self._count == len(self._grads):
            return list(self._grads)
        found: list[Tensor | None] = [None] * self._count
        for index, grad in zip(self._indices, self._grads or (), strict=False):
            found[index] = grad
        return found


class _Receive(Function):
    """(inlet, phony, (values...)) -> values, which backward keeps no hold of: gradients go to the inlet."""

    @staticmethod
    def forward(ctx: Any, inlet: Inlet, _: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inlet = inlet
        return (values[0].detach(),) if len(values) == 1 else tuple([value.detach() for value in values])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.inlet.take(grads)
        return (None, None, None)


def receive(values: Values, phony: Tensor) -> tuple[Values, Inlet | None]:
    """Flat inputs of a task as its layers get them, and their inlet; None where no input needs a gradient.

    A leaf of the graph would keep its value alive for as long as the graph, whether the layers need it or not.

    Args:
        values: the inputs.
        phony: a leaf of the device that computes the task, made while its stream was current.
    """
    indices = differentiable(values)
    if not indices:
        return values, None
    inlet = Inlet(indices, len(values))
    if len(indices) == len(values):
        return apply(_Receive, inlet, phony, values), inlet
    return replace(values, indices, apply(_Receive, inlet, phony, [values[index] for index in indices])), inlet
