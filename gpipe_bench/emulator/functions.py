"""Functions that accelerators run as one kernel, and PyTorch writes out for a device type that it does not know.

The simulator has them: attention, RMS norms, Mish, recurrent layers and their cells. Here each becomes the kernel of
the virtual devices for its operator, for all threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from gpipe_bench.simulator.tracing.attention import attention
from gpipe_bench.simulator.tracing.fused_kernels import gru_cell, lstm_cell, mish, rms_norm
from gpipe_bench.simulator.tracing.recurrent import RECURRENT, fused

__all__ = ["register_fused"]

_aten: Final[Any] = torch.ops.aten
# They stay registered as long as the library lives.
_libraries: Final[list[Any]] = []


def register_fused() -> None:
    """Let these operators be one kernel each on virtual devices, from now on."""
    if _libraries:
        return
    make: Any = torch.library.Library
    library = make("aten", "IMPL")
    _libraries.append(library)
    for operator, one in (
        (_aten.scaled_dot_product_attention.default, attention),
        (_aten.rms_norm.default, rms_norm),
        (_aten.lstm_cell.default, lstm_cell),
        (_aten.gru_cell.default, gru_cell),
        *((getattr(_aten, function.__name__).input, _recurrent(function)) for function in RECURRENT),
    ):
        kernel = _tried(one, operator)
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            library.impl(operator, kernel, key)
    library.impl(_aten.mish.default, _mish, "AutogradPrivateUse1")
    library.impl(_aten.mish_.default, _mish_in_place, "AutogradPrivateUse1")


def _tried(one: Any, operator: Any) -> Callable[..., Any]:
    """``one`` where it gives something, else what PyTorch writes the operator out as."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        found = one(*args, **kwargs)
        return operator.decompose(*args, **kwargs) if found is None else found

    return kernel


def _recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: fused(function, args)


def _mish(x: Tensor) -> Tensor:
    found = mish(x)
    if found is not None:
        return found
    with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - as PyTorch's own kernels do
        result: Tensor = _aten.mish.default(x)
        return result


def _mish_in_place(x: Tensor) -> Tensor:
    found = mish(x, True)
    if found is not None:
        return found
    with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - likewise
        result: Tensor = _aten.mish_.default(x)
        return result
