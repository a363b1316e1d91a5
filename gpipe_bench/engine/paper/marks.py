"""Where the backward pass of a task without checkpoint begins and ends, while somebody observes.

Such a backward pass is many autograd nodes. A mark at the task's outputs sees it begin, one at its inputs sees it end.
Where no input needs a gradient (the first partition), every node of the task reports, and the last one ends it.
(Refused: hooks on parameters, whose gradients are accumulated once per backward pass, not once per micro-batch.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from gpipe_bench.autograd.microbatch import Values, differentiable
from gpipe_bench.autograd.nodes import behind, nodes_behind, pass_through
from gpipe_bench.engine.observer import Observer, Task


def run_marked(observer: Observer, task: Task, run: Callable[[Values], Values], values: Values) -> Values:
    """Compute a task so that ``observer`` sees its backward pass."""
    mark = _Mark(observer, task)
    ends = bool(differentiable(values))
    outputs = run(behind(_Report, values, mark.end))
    if not ends:
        for node in nodes_behind([value.grad_fn for value in outputs if isinstance(value, Tensor)]):
            # Tasks share the accumulation of gradients.
            if type(node).__name__ != "AccumulateGrad":
                node.register_hook(mark.end)
    return behind(_Report, outputs, mark.begin)


class _Mark:
    def __init__(self, observer: Observer, task: Task) -> None:
        self._observer = observer
        self._task = task
        self._token: Any = None

    def begin(self) -> None:
        self._token = self._observer.start(self._task)
        self._observer.finish(self._token, 0)

    def end(self, *_: Any) -> None:
        if self._token is not None:
            self._observer.finish(self._token, 0)


class _Report(Function):
    """(report, values...) -> values; backward calls the report."""

    @staticmethod
    def forward(ctx: Any, report: Callable[[], None], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.report = report
        return pass_through(ctx, values, (True,) * len(values))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.report()
        return (None, *grads)
