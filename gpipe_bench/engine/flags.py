"""Whether this thread is in the first pass, or in the recomputation, of a checkpointed task."""

from __future__ import annotations

import threading

import torch

__all__ = ["is_checkpointing", "is_recomputing", "set_flags"]


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


class set_flags:  # noqa: N801 - reads as a statement: `with set_flags(recomputing=True):`
    """Set both flags of this thread for the block, and, unless ``grad`` is None, its grad mode.

    One object for both, since every tiny task with a checkpoint pays for it twice.
    """

    __slots__ = ("_flags", "_grad", "_grad_before", "_previous")

    def __init__(self, *, checkpointing: bool = False, recomputing: bool = False, grad: bool | None = None) -> None:
        self._flags = checkpointing, recomputing
        self._grad = grad

    def __enter__(self) -> None:
        """Remember the flags, and change them."""
        self._previous, _flags.now = _flags.now, self._flags
        if self._grad is not None:
            self._grad_before = torch.is_grad_enabled()
            torch._C._set_grad_enabled(self._grad)  # noqa: SLF001 - as torch.set_grad_enabled does

    def __exit__(self, *_: object) -> None:
        """Put them back."""
        _flags.now = self._previous
        if self._grad is not None:
            torch._C._set_grad_enabled(self._grad_before)  # noqa: SLF001 - as above
