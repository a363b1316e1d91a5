"""What a task inherits from the thread that calls the pipeline: grad mode, inference mode, autocast.

All of these are thread-local in PyTorch. A worker that did not inherit them would silently train in float32 under
autocast, or build a graph under no_grad.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from gpipe_bench.engine.flags import set_flags

__all__ = ["Ambience"]

_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class Ambience:
    """A snapshot of the thread-local modes.

    Attributes:
        grad: grad mode.
        inference: inference mode.
        autocast: (device type, enabled, dtype) of each device type involved.
        casts: whether autocast is on for any of them.
        cache: whether autocast keeps the weights that it has cast.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    casts: bool
    cache: bool

    @classmethod
    def capture(cls, devices: list[torch.device]) -> Ambience:
        """The modes of the calling thread, for work on ``devices``."""
        types = sorted({"cpu", *(device.type for device in devices)})
        autocast = tuple(
            (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
            for name in types
            if torch.amp.autocast_mode.is_autocast_available(name)
        )
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=autocast,
            casts=any(enabled for _, enabled, _ in autocast),
            cache=torch.is_autocast_cache_enabled(),
        )

    def applied(self, *, checkpointing: bool = False, recomputing: bool = False) -> AbstractContextManager[object]:
        """Put the modes into force in this thread for a block, with the flags of a checkpoint if it is one's pass.

        What already agrees is left alone.

        Args:
            checkpointing: the first pass of a checkpoint: no graph, and no cached casts, since a weight that was
                cast without a graph would be reused by a micro-batch that needs its gradient.
            recomputing: a recomputation: with a graph, whatever the thread's mode.
        """
        grad = recomputing or (self.grad and not checkpointing)
        casts = self.casts or torch._C._is_any_autocast_enabled()  # noqa: SLF001 - no public way
        inference_fits = torch.is_inference_mode_enabled() == self.inference
        change: AbstractContextManager[object] = _NOTHING
        if checkpointing or recomputing:
            change = set_flags(checkpointing=checkpointing, recomputing=recomputing, grad=grad)
        elif torch.is_grad_enabled() != grad or not inference_fits:
            change = _GradMode(grad)
        if inference_fits and not casts:
            return change
        # Inference mode changes grad mode, too.
        changes = [change] if inference_fits else [torch.inference_mode(self.inference), change]
        for name, enabled, dtype in self.autocast if casts else ():
            if enabled or torch.is_autocast_enabled(name):
                cache = self.cache and not checkpointing
                changes.append(torch.autocast(name, dtype=dtype, enabled=enabled, cache_enabled=cache))
        return _all(changes)


class _GradMode:
    """``torch.set_grad_enabled`` that changes the mode when the block begins, not when it is made."""

    __slots__ = ("_mode", "_previous")

    def __init__(self, mode: bool) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._previous = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._mode)  # noqa: SLF001 - as torch.set_grad_enabled does

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._previous)  # noqa: SLF001 - as above


@contextmanager
def _all(changes: list[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield
