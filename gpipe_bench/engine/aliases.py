"""Tensors that enter or leave a partition twice: as two values, as a value and a skip, or as views of one memory.

    x ──┬── value ──► partition 1: relu_(x)      In the plain module relu_ changes the skip, too. Behind a boundary the
        └── skip  ──► partition 2: x + skip      skip may be a copy, and autograd sees two tensors.

Handing on one tensor twice is fine, as is a batch of one tensor twice. Writing to it behind the boundary is an error,
since the result would depend on where the model is cut. A layer that needs to write clones the tensor first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

__all__ = ["aliased_values", "refuse_write", "separated"]


def aliased_values(values: Sequence[Any], carried: Iterable[Tensor] = ()) -> frozenset[int]:
    """Indices of the tensors that share memory with another one among ``values``, or with one of ``carried``.

    Args:
        values: a batch, or flat outputs of a task.
        carried: inputs of the task that share memory with tensors that go other ways.
    """
    tensors = [(index, value) for index, value in enumerate(values) if _has_memory(value)]
    found = {index for index, value in tensors if any(_overlap(value, other) for other in carried)}
    for (one, first), (other, second) in combinations(tensors, 2):
        if _overlap(first, second):
            found |= {one, other}
    return frozenset(found)


def separated(outputs: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """``outputs``, with copies of those that share memory with one of ``inputs``."""
    tensors = [value for value in inputs if _has_memory(value)]
    shares = [_has_memory(value) and any(_overlap(value, other) for other in tensors) for value in outputs]
    # A layer may have left grad mode off.
    with torch.enable_grad():
        return tuple([value.clone() if shared else value for value, shared in zip(outputs, shares, strict=True)])


def refuse_write(j: int) -> RuntimeError:
    """The error for a partition that writes to an aliased input."""
    return RuntimeError(
        f"a tensor that enters or leaves a partition twice must not be written to behind the boundary, got an in-place "
        f"operation in partition {j} on one that also went another way; clone it before, or work out of place"
    )


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.numel() > 0 and value.data_ptr() != 0


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share an element."""
    if one.device != other.device or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    (begin, end), (start, stop) = _extent(one), _extent(other)
    if end <= start or stop <= begin:
        return False
    if one.is_contiguous() or other.is_contiguous():
        return True
    # Interleaved, as two column blocks of a matrix: look at each byte between.
    first = torch.zeros(max(end, stop) - min(begin, start), dtype=torch.bool)
    second = torch.zeros_like(first)
    for tensor, place, marks in ((one, begin, first), (other, start, second)):
        size = tensor.element_size()
        strides = [stride * size for stride in tensor.stride()]
        marks.as_strided((*tensor.shape, size), (*strides, 1), place - min(begin, start)).fill_(True)
    return bool((first & second).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor and the one behind its last, from the beginning of its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.element_size()
    return int(begin), int(begin + (last + 1) * tensor.element_size())
