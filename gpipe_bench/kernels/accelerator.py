"""Operators that accelerators run as one kernel, and PyTorch writes out for devices that it does not know.

The simulator registers the kernels for the meta device while it traces, the emulator for its virtual devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from gpipe_bench.kernels.attention import attention
from gpipe_bench.kernels.fused_kernels import dropout, gru_cell, lstm_cell, mish_backward, rms_norm
from gpipe_bench.kernels.recurrent import RECURRENT, fused

_aten: Final[Any] = torch.ops.aten
_WRITTEN_OUT: Final = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001 - it has no public name
_library: Final[Any] = torch.library  # PyTorch leaves it untyped


@contextmanager
def accelerator_kernels() -> Iterator[None]:
    """Run operators on the meta device as accelerators run them, as long as the block lasts."""
    with _library._scoped_library("aten", "IMPL") as library:  # noqa: SLF001 - it has no public name
        register_fused(library, "AutogradMeta")
        library.impl(_aten.dropout.default, _tried(dropout, _aten.dropout.default), "AutogradMeta")
        yield


def register_fused(library: Any, *keys: str) -> None:
    """Let these operators be one kernel each.

    Args:
        library: keeps the registrations, as long as it lives.
        keys: dispatch keys of the device.
    """
    for operator, one in (
        (_aten.scaled_dot_product_attention.default, attention),
        (_aten.rms_norm.default, rms_norm),
        (_aten.mish_backward.default, mish_backward),
        (_aten.lstm_cell.default, lstm_cell),
        (_aten.gru_cell.default, gru_cell),
        *((operator, _recurrent(operator)) for operator in RECURRENT),
    ):
        for key in keys:
            library.impl(operator, _tried(one, operator), key)


def _tried(one: Any, operator: Any) -> Callable[..., Any]:
    """``one`` where it gives something, else what PyTorch writes the operator out as."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        found = one(*args, **kwargs)
        # Not `decompose`, which prefers a version in Python of its own where PyTorch has one.
        return operator._op_dk(_WRITTEN_OUT, *args, **kwargs) if found is None else found  # noqa: SLF001

    return kernel


def _recurrent(operator: Any) -> Callable[..., Any]:
    return lambda *args: fused(operator, args)
