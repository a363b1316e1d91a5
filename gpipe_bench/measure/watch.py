"""The tensor operations of one thread, below autograd, shown to an object that counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

# PyTorch has no public way to switch a mode on in one call and off in another: TorchDispatchMode.__enter__ also keeps
# process-wide flags, which threads that overlap would restore in the wrong order.
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from gpipe_bench.autograd.dispatch_mode import DispatchMode, tensors_in


class Accountant(Protocol):
    """Counts operations; any thread may call it."""

    def account(self, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Enter one operation, which this thread has just run."""


class Watch(DispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves these two untyped
    """A mode that shows each operation of its thread to ``owner``."""

    def __init__(self, owner: Accountant) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.owner = owner

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, and show its operands and results."""
        results = func(*args, **kwargs)
        self.owner.account(list(tensors_in((args, kwargs))), list(tensors_in(results)))
        return results


def is_watched(owner: Accountant) -> bool:
    """Whether this thread shows its operations to ``owner``."""
    return any(isinstance(mode, Watch) and mode.owner is owner for mode in _get_current_dispatch_mode_stack())


def switch_on(owner: Accountant) -> Watch:
    """Show the operations of this thread to ``owner`` from now on."""
    watch = Watch(owner)
    _push_mode(watch)
    return watch


def switch_off(watch: Watch | None) -> None:
    """Switch a mode off that this thread switched on.

    One that is not on top was switched on inside an autograd node, which has taken it away since.
    """
    if watch is not None and _get_current_dispatch_mode_stack()[-1:] == [watch]:
        _pop_mode()
