"""Where the backward pass of a task without checkpoint begins and ends, while somebody observes.

Such a backward pass is many autograd nodes. A mark at the task's outputs sees it begin; one at its inputs sees it
end. Where no input needs a gradient (the first partition), the last parameter gradient to be accumulated ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from gpipe_bench.engine.autograd import apply
from gpipe_bench.engine.microbatch import Values, differentiable, replace
from gpipe_bench.engine.observer import Observer, Task
from gpipe_bench.timeline import COMPUTE_KINDS

__all__ = ["MarkingObserver"]


class MarkingObserver:
    """Passes everything on to an observer, and marks backward passes for it.

    Args:
        observer: whom to tell.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        # partition -> token of the backward pass that parameter gradients prolong
        self._open: dict[int, Any] = {}

    def start(self, task: Task) -> Any:
        """See :meth:`Observer.start`; a computation ends what was open on its partition."""
        if task.kind in COMPUTE_KINDS:
            self._open.pop(task.partition, None)
        return self._observer.start(task)

    def finish(self, token: Any, nbytes: int) -> None:
        """See :meth:`Observer.finish`."""
        self._observer.finish(token, nbytes)

    def mark_inputs(self, values: Values, mark: _Mark) -> Values:
        """Values that report the end of the backward pass ``mark`` when their gradients leave."""
        return _apply(_End, mark, values)

    def mark_outputs(self, values: Values, mark: _Mark) -> Values:
        """Values that report its beginning when their gradients arrive."""
        return _apply(_Begin, mark, values)

    def mark(self, task: Task) -> _Mark:
        """A mark for one backward pass."""
        return _Mark(self, task)

    def prolongable(self, partition: int, token: Any) -> None:
        """From now on gradients of the parameters of ``partition`` prolong the backward pass of ``token``."""
        self._open[partition] = token

    def prolong(self, partition: int, _parameter: Tensor) -> None:
        """A parameter of ``partition`` has received a gradient."""
        token = self._open.get(partition)
        if token is not None:
            self._observer.finish(token, 0)

    @contextmanager
    def watching(self, partitions: Sequence[nn.Module]) -> Iterator[None]:
        """Watch the parameters of ``partitions``."""
        with ExitStack() as stack:
            for index, partition in enumerate(partitions):
                for parameter in partition.parameters():
                    if parameter.requires_grad:
                        handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                            partial(self.prolong, index)
                        )
                        stack.callback(handle.remove)
            yield


class _Mark:
    def __init__(self, observer: MarkingObserver, task: Task) -> None:
        self._observer = observer
        self._task = task
        self._token: Any = None

    def begin(self) -> None:
        self._token = self._observer.start(self._task)
        self._observer.prolongable(self._task.partition, self._token)
        self._observer.finish(self._token, 0)

    def end(self) -> None:
        if self._token is not None:
            self._observer.finish(self._token, 0)


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, mark: _Mark, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.mark = mark
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.mark.begin()
        return (None, *grads)


class _End(Function):
    @staticmethod
    def forward(ctx: Any, mark: _Mark, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.mark = mark
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.mark.end()
        return (None, *grads)


def _apply(function: type[Function], mark: _Mark, values: Values) -> Values:
    indices = differentiable(values)
    if not indices:
        return values
    return replace(values, indices, apply(function, mark, *(values[index] for index in indices)))
