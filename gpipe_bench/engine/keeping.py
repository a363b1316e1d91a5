"""What the graph of a task keeps for its backward pass, beside what others keep anyway."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["inner_bytes"]

_PREFIX: Final = "_raw_saved_"
_SILENT: Final = frozenset({"CopySlices", "CppFunction"})
"""Nodes of PyTorch that may keep tensors and do not show them: of a write to a view, and of an extension."""

_VIEW: Final = re.compile(
    r"(Alias|AsStrided|Diagonal|Expand|Permute|ReshapeAlias|Select|Slice|Split|SplitWithSizes|Squeeze|T|Transpose|Unbind"
    r"|Unfold|UnsafeSplit|UnsafeView|Unsqueeze|View)Backward\d*$"
)
"""Names of nodes whose outputs are parts of their inputs."""


def inner_bytes(nodes: Sequence[Any], others: Iterable[Any], outputs: Iterable[Any]) -> int:
    """Bytes that a graph keeps at most.

    Args:
        nodes: of the graph.
        others: values whose memory does not count: its inputs, outputs, parameters and buffers.
        outputs: its outputs.

    Returns:
        Bytes of the memory in which nodes have saved something. Where one does not tell, those of all that nodes made
        but outputs and views.
    """
    apart = {_place(value) for value in others if isinstance(value, Tensor)}
    if all(map(_tells, nodes)):
        kept = {_place(value): value.untyped_storage().nbytes() for node in nodes for value in _saved(node)}
        return sum(nbytes for place, nbytes in kept.items() if place not in apart)
    last = {value.grad_fn for value in outputs if isinstance(value, Tensor)}
    inner = (node for node in nodes if node not in last and not _VIEW.match(type(node).__name__))
    # Absent before it was added to PyTorch.
    made = (each for node in inner for each in getattr(node, "_input_metadata", ()))
    return sum(prod(each.shape) * each.dtype.itemsize for each in made)


def _tells(node: Any) -> bool:
    """Whether a node shows memory that it keeps: no function in Python does, nor one for which hooks keep it."""
    if isinstance(node, torch._C._FunctionBase) or type(node).__name__ in _SILENT:  # noqa: SLF001 - no other name
        return False
    # Both absent before they were added to PyTorch; what hands tensors out would call the hooks.
    slots = [*_slots(node)]
    if not all(hasattr(slot, "data") and slot.unpack_hook is None for slot in slots):
        return False
    return all(slot.data is None or slot.data.layout is torch.strided for slot in slots)


def _saved(node: Any) -> list[Tensor]:
    return [slot.data for slot in _slots(node) if slot.data is not None]


def _slots(node: Any) -> Iterator[Any]:
    """Where a node saves tensors."""
    for name in dir(node):
        if name.startswith(_PREFIX):
            found = getattr(node, name)
            yield from found if isinstance(found, tuple) else (found,)


def _place(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
