"""Thread-local state of a task: the caller's modes and context variables, and what the task is for.

A worker that did not inherit them would silently train in float32 under autocast, or build a graph under no_grad.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass

import torch
from torch.nn.utils import parametrize


class _Flags(threading.local):
    now = (False, False)


_flags = _Flags()


def is_checkpointing() -> bool:
    """Whether this thread runs a layer whose activations are not kept, because it will be recomputed.

    In the recomputation this is False and :func:`is_recomputing` is True. Without a checkpoint both are False.
    """
    return _flags.now[0]


def is_recomputing() -> bool:
    """Whether this thread recomputes a layer. Such a layer must skip what happens once per micro-batch, as counting."""
    return _flags.now[1]


@dataclass(frozen=True, slots=True)
class ExecutionContext:
    """A snapshot of thread-local state.

    Attributes:
        grad: whether grad mode is on.
        inference: whether inference mode is on.
        autocast: (device type, enabled, dtype) of each type involved.
        cache: whether autocast keeps casts.
        variables: the values of ``contextvars``, among them the settings of ``torch.compile``.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    variables: Context

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> ExecutionContext:
        """The state of the calling thread, for work on ``devices``."""
        autocast = tuple(
            (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
            for name in sorted({"cpu", *(device.type for device in devices)})
            if torch.amp.autocast_mode.is_autocast_available(name)
        )
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return cls(grad, inference, autocast, torch.is_autocast_cache_enabled(), copy_context())

    @contextmanager
    def applied(self, *, checkpointing: bool = False, recomputing: bool = False) -> Iterator[None]:
        """Apply the modes to this thread for a block; a mode that already agrees is left alone.

        Args:
            checkpointing: the first pass of a checkpoint: no graph, and no cached casts. A weight that was cast
                without a graph would be reused by a micro-batch that needs its gradient.
            recomputing: a recomputation: with a graph, whatever the thread's mode.
        """
        before = _flags.now
        with ExitStack() as stack:
            # Inference mode first: it changes grad mode, too.
            if torch.is_inference_mode_enabled() != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            for name, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(name):
                    cache = self.cache and not checkpointing
                    stack.enter_context(torch.autocast(name, dtype=dtype, enabled=enabled, cache_enabled=cache))
            stack.enter_context(torch.set_grad_enabled(recomputing or (self.grad and not checkpointing)))
            _flags.now = checkpointing, recomputing
            try:
                yield
            finally:
                _flags.now = before


@contextmanager
def uncached_weights(*, shared: bool, anew: bool) -> Iterator[None]:
    """Refuse PyTorch's cache of parametrized weights in a block where it could give a wrong weight.

    Within ``torch.nn.utils.parametrize.cached()`` a weight is computed once, and the next layer that asks, in whatever
    thread, gets it. Where tasks run at the same time (``shared``) no layer may open the cache. Where each has a graph
    of its own (``anew``) nobody may: the weight of another task has no graph, or one that was run backward already.
    """
    before = parametrize._cache  # noqa: SLF001 - there is no public way to ask; a new one when the last block ends
    if anew and parametrize._cache_enabled:  # noqa: SLF001 - as above; the number of blocks
        raise RuntimeError(
            "parametrized weights must be computed in each task, got parametrize.cached() around a batch with "
            "checkpoints or a schedule; leave it out, or use checkpoint='never' without a schedule"
        )
    yield
    if shared and parametrize._cache is not before:  # noqa: SLF001 - as above
        raise RuntimeError(
            "parametrized weights must be computed in each task, got parametrize.cached() within a layer, whose cache "
            "is that of all partitions; take the weight once instead, as in weight = self.linear.weight"
        )
