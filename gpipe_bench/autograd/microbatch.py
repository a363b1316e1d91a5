"""Micro-batches: the flat values that go from partition to partition, and the memory that they share.

    x ──┬── value ──► partition 1: relu_(x)      In the plain module relu_ changes the skip, too. Behind a boundary the
        └── skip  ──► partition 2: x + skip      skip may be a copy, and autograd sees two tensors.

A tensor may enter or leave a partition twice: as two values, as a value and a skip, or as views of one memory. Writing
to it behind the boundary is an error, since the result would depend on where the model is cut. A layer that needs to
write clones the tensor first.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.skip.trees import TreeSpec, tree_flatten, tree_unflatten

Values = tuple[Any, ...]
"""The tensors, and whatever else, that go from layer to layer."""


@dataclass(slots=True)
class MicroBatch:
    """What one layer hands to the next, as a flat tuple.

    Attributes:
        values: the tensors, each of shape (micro-batch size, ...), and what else there is.
        structure: how layers see them: None for the one value as it is, else a tree of tuples, lists, dicts and
            whatever else PyTorch's pytrees know.
        aliased: indices of the values that share memory with another tensor on its way.
    """

    values: Values
    structure: TreeSpec | None
    aliased: frozenset[int] = frozenset()

    def unwrap(self) -> Any:
        """To what a layer takes or gives."""
        return self.values[0] if self.structure is None else tree_unflatten(self.values, self.structure)


def flatten(value: Any) -> tuple[Values, TreeSpec | None]:
    """The values and the structure of a micro-batch, from what a layer takes or gives."""
    if isinstance(value, Tensor):
        return (value,), None
    leaves, structure = tree_flatten(value)
    check_open(leaves)
    return tuple(leaves), structure


def check_open(values: Iterable[Any]) -> None:
    """Refuse objects that hide tensors, whose gradients a checkpoint or a copy would lose."""
    for value in values:
        if not isinstance(value, Tensor) and _hides_tensors(value):
            raise TypeError(
                f"layers must hand on tensors in tuples, lists or dicts, got a {type(value).__name__} that holds "
                "some; return these tensors in a tuple and put the rest together in the layer that uses them, or "
                "register a class of your own with torch.utils._pytree.register_pytree_node"
            )


_LEFT_ALONE = (bool, int, float, complex, str, bytes, type, nn.Module, ModuleType, CodeType, FrameType, TracebackType)


def _hides_tensors(value: Any) -> bool:
    """Whether an object leads to tensors: by attributes, items, what a function closes over or a method is bound to.

    Modules are left alone, and so are the global names of a function.
    """
    seen: dict[int, Any] = {}
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, Tensor):
            return True
        if id(each) in seen or isinstance(each, _LEFT_ALONE):
            continue
        seen[id(each)] = each  # its id stays its own for as long
        if isinstance(each, FunctionType):
            todo += [each.__closure__, each.__defaults__, each.__kwdefaults__, each.__dict__]
        else:
            todo += gc.get_referents(each)
            # What built-in functions are bound to, as Tensor.add is, which PyTorch does not tell the collector.
            todo.append(getattr(each, "__self__", None))
    return False


def differentiable(values: Sequence[Any]) -> list[int]:
    """Indices of the tensors that require a gradient."""
    return [index for index, value in enumerate(values) if needs_gradient(value)]


def needs_gradient(value: Any) -> bool:
    """Whether it is a tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def cut(values: Sequence[Any], needs_grad: Sequence[bool] | None = None) -> Values:
    """``values`` as leaves, each of which requires a gradient as ``needs_grad`` says, or if the value does."""
    needs_grad = [needs_gradient(value) for value in values] if needs_grad is None else needs_grad
    return tuple(
        [
            value.detach().requires_grad_(needed) if isinstance(value, Tensor) else value
            for value, needed in zip(values, needs_grad, strict=True)
        ]
    )


def replace(values: Values, indices: Sequence[int], tensors: Sequence[Tensor]) -> Values:
    """``values`` with ``tensors`` at ``indices``."""
    if len(indices) == len(values):
        return tuple(tensors)
    changed = list(values)
    for index, tensor in zip(indices, tensors, strict=True):
        changed[index] = tensor
    return tuple(changed)


def versions(values: Values) -> list[int]:
    """How often each tensor was written to: autograd's own count, shared by all tensors with the same memory.

    ``Tensor._version`` has no public name, but PyTorch's notes on autograd describe it. Inference tensors do not count.
    """
    return [value._version if isinstance(value, Tensor) and not value.is_inference() else 0 for value in values]  # noqa: SLF001 - see above


def check_device(name: str, tensor: Tensor, device: torch.device | None) -> None:
    """Check that an input is where the first partition is."""
    if device is not None and tensor.device != device:
        advice = "move it with .to(pipe.devices[0])"
        if device.type == "meta":
            advice = "make the pipeline of layers that have numbers, after module.to_empty() or load_state_dict()"
        raise ValueError(f"{name} must be on the first partition's device {device}, got {tensor.device}; {advice}")


def aliased_values(values: Sequence[Any], carried: Iterable[Tensor] = ()) -> frozenset[int]:
    """Indices of the tensors that share memory with another one among ``values``, or with one of ``carried``."""
    # Most tensors have a memory of their own, so only those of one memory are compared in pairs.
    sharing: defaultdict[int, list[tuple[int, Tensor]]] = defaultdict(list)
    for place, value in enumerate([*values, *carried]):
        if has_memory(value):
            sharing[value.untyped_storage().data_ptr()].append((place, value))
    return frozenset(
        place
        for group in sharing.values()
        for place, value in group
        if place < len(values) and any(other != place and _overlap(value, theirs) for other, theirs in group)
    )


def separated(outputs: Values, inputs: Sequence[Any], kept: AbstractSet[int]) -> Values:
    """``outputs``, with copies of those that share memory with one of ``inputs``, or are in memory at ``kept``."""
    tensors = [value for value in inputs if has_memory(value)]
    shares = [
        has_memory(value)
        and (value.untyped_storage().data_ptr() in kept or any(_overlap(value, other) for other in tensors))
        for value in outputs
    ]
    if not any(shares):
        return outputs
    # A layer may have left grad mode off.
    with torch.enable_grad():
        return tuple([value.clone() if shared else value for value, shared in zip(outputs, shares, strict=True)])


def has_memory(value: Any) -> bool:
    """Whether it is a tensor with elements in memory that it shows."""
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
    first = torch.zeros(max(end, stop) - min(begin, start), dtype=torch.bool, device="cpu")
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
