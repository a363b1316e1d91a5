"""What the graph of a task keeps for its backward pass: the tensors that its nodes have saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Kept", "is_dense", "kept_by"]

_PREFIX: Final = "_raw_saved_"
_SILENT: Final = frozenset({"CopySlices", "CppFunction"})
"""Nodes of PyTorch that may keep tensors and do not show them: of a write to a view, and of an extension."""


class Kept(NamedTuple):
    """Bytes of memory in which nodes have saved something.

    Attributes:
        inputs: that of the task's inputs.
        outputs: that of its outputs.
        inner: all other but that of weights.
    """

    inputs: int
    outputs: int
    inner: int


def is_dense(values: Iterable[Any]) -> bool:
    """Whether all tensors are plain ones that have a piece of memory each, which a sparse or nested one has not."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return all(type(x) in {Tensor, nn.Parameter} and x.layout is torch.strided and not x.is_nested for x in tensors)


def kept_by(nodes: Iterable[Any], inputs: Iterable[Any], outputs: Iterable[Any], weights: Iterable[Any]) -> Kept | None:
    """What a task's nodes keep.

    Args:
        nodes: of its graph.
        inputs: its inputs, dense as all of these.
        outputs: its outputs.
        weights: its parameters and buffers.

    Returns:
        None where a node does not tell: one of a function in Python, which may keep anything, one for which hooks keep
        what it saves, and one that saves what is not dense. Likewise before PyTorch showed what is saved without
        handing it out.
    """
    kept: dict[int, int] = {}
    for node in nodes:
        if isinstance(node, torch._C._FunctionBase) or type(node).__name__ in _SILENT:  # noqa: SLF001 - no other name
            return None
        for slot in _slots(node):
            # What hands tensors out would call the hooks.
            if not hasattr(slot, "data") or slot.unpack_hook is not None or not is_dense([slot.data]):
                return None
            if slot.data is not None:
                kept[_place(slot.data)] = slot.data.untyped_storage().nbytes()
    of_weights, of_inputs, of_outputs = (_places(values) for values in (weights, inputs, outputs))
    coming, going = of_inputs - of_weights, of_outputs - of_inputs - of_weights
    inner = kept.keys() - of_weights - of_inputs - of_outputs
    return Kept(*(sum(kept.get(place, 0) for place in places) for places in (coming, going, inner)))


def _slots(node: Any) -> Iterator[Any]:
    """Where a node saves tensors."""
    for name in dir(node):
        if name.startswith(_PREFIX):
            found = getattr(node, name)
            yield from found if isinstance(found, tuple) else (found,)


def _places(values: Iterable[Any]) -> set[int]:
    return {_place(value) for value in values if isinstance(value, Tensor)}


def _place(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
