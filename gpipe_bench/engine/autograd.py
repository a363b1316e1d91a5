"""The one place where an autograd function is applied: PyTorch leaves ``Function.apply`` without annotations."""

from __future__ import annotations

from typing import Any

from torch.autograd import Function

__all__ = ["apply"]


def apply(function: type[Function], *args: Any) -> tuple[Any, ...]:
    """Apply a function that returns a tuple."""
    outputs: tuple[Any, ...] = function.apply(*args)  # type: ignore[no-untyped-call]
    return outputs
