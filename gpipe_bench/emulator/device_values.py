"""Values of small tensors on virtual devices, see ``csrc/values.h``."""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from gpipe_bench.emulator.library import backend

MOST_BYTES: Final = 64 * 1024
"""Tensors whose storage has at most so many bytes keep their values."""


def keep_values() -> None:
    """Keep the values of small tensors from now on; reading others is an error."""
    backend().vd_keep_values(1)


def values_of(tensor: Tensor) -> Tensor | None:
    """A copy of a device's tensor on the CPU, outside of virtual time; None: nobody knows its values."""
    place = backend().vd_values(tensor._cdata)  # noqa: SLF001 - C++ knows it by that
    return None if place is None and tensor.numel() else _seen(tensor, place).clone()


def write_values(tensor: Tensor, values: Tensor | None) -> None:
    """Write all of a device's tensor, outside of virtual time; None: nobody knows its values then."""
    place = backend().vd_write_values(tensor._cdata) if values is not None else None  # noqa: SLF001 - likewise
    if values is None or (place is None and tensor.numel()):
        backend().vd_forget_values(tensor._cdata)  # noqa: SLF001 - likewise
    else:
        _seen(tensor, place).copy_(values.view(tensor.dtype).reshape(tensor.shape))


def _seen(tensor: Tensor, place: int | None) -> Tensor:
    """The same memory as a tensor of the CPU."""
    if place is None or not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    nbytes = tensor.untyped_storage().nbytes()
    memory = (ctypes.c_char * nbytes).from_address(place)
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=nbytes // tensor.itemsize)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
