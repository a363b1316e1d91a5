"""What a task inherits from the thread that calls the pipeline: grad mode, inference mode, autocast.

All of these are thread-local in PyTorch. A worker that did not inherit them would silently train in float32 under
autocast, or build a graph under no_grad.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Ambience"]


@dataclass(frozen=True, slots=True)
class Ambience:
    """A snapshot of the thread-local modes.

    Attributes:
        grad: grad mode.
        inference: inference mode.
        autocast: (device type, enabled, dtype) of each device type involved.
        cache: whether autocast keeps the weights that it has cast.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @classmethod
    def capture(cls, devices: list[torch.device]) -> Ambience:
        """The modes of the calling thread, for work on ``devices``."""
        types = sorted({"cpu", *(device.type for device in devices)})
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
                for name in types
                if torch.amp.autocast_mode.is_autocast_available(name)
            ),
            cache=torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def applied(self, *, checkpointing: bool = False, recomputing: bool = False) -> Iterator[None]:
        """Put the modes into force in this thread; what already agrees is left alone.

        Args:
            checkpointing: the first pass of a checkpoint: no graph, and no cached casts, since a weight that was
                cast without a graph would be reused by a micro-batch that needs its gradient.
            recomputing: a recomputation: with a graph, whatever the thread's mode.
        """
        grad = recomputing or (self.grad and not checkpointing)
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled() != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            if torch.is_grad_enabled() != grad:
                stack.enter_context(torch.set_grad_enabled(grad))
            for name, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(name):
                    cache = self.cache and not checkpointing
                    stack.enter_context(torch.autocast(name, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield
