"""Micro-batches: splitting a batch along its first dimension, and putting the results together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.engine.aliases import aliased_values
from gpipe_bench.skip.trees import TreeSpec, tree_flatten, tree_unflatten

__all__ = [
    "MicroBatch",
    "Values",
    "can_have_gradient",
    "check_device",
    "check_input",
    "cut",
    "differentiable",
    "flatten",
    "gather",
    "needs_gradient",
    "replace",
    "scatter",
    "unflatten",
    "versions",
]

Values = tuple[Any, ...]
"""The tensors, and whatever else, that go from layer to layer."""


@dataclass(slots=True)
class MicroBatch:
    """What one layer hands to the next, as a flat tuple.

    Attributes:
        values: the tensors, each of shape (micro-batch size, ...), and what else there is.
        structure: how layers see them: None for the one value as it is, else a tree of tuples, lists, dicts and
            whatever else PyTorch's pytrees know.
        aliased: indices of the values that share memory with another tensor on its way, see
            :mod:`gpipe_bench.engine.aliases`.
    """

    values: Values
    structure: TreeSpec | None
    aliased: frozenset[int] = frozenset()

    @classmethod
    def wrap(cls, value: Any) -> MicroBatch:
        """From what a layer takes or gives, see :func:`flatten`."""
        return cls(*flatten(value))

    def unwrap(self) -> Any:
        """To what a layer takes or gives."""
        return unflatten(self.values, self.structure)


def flatten(value: Any) -> tuple[Values, TreeSpec | None]:
    """The values and the structure of a micro-batch, from what a layer takes or gives.

    Raises:
        TypeError: an object of a kind that no pytree knows holds tensors, whose gradients would be lost.
    """
    if isinstance(value, Tensor):
        return (value,), None
    leaves, structure = tree_flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and _hides_tensors(leaf):
            raise TypeError(
                f"layers must hand on tensors in tuples, lists or dicts, got a {type(leaf).__name__} that holds "
                "some; return a tuple, or register the class with torch.utils._pytree.register_pytree_node"
            )
    return tuple(leaves), structure


def unflatten(values: Values, structure: TreeSpec | None) -> Any:
    """What a layer takes or gives, from the values and the structure of a micro-batch."""
    return values[0] if structure is None else tree_unflatten(values, structure)


def _hides_tensors(value: Any, depth: int = 4) -> bool:
    """Whether an object has tensors in its attributes or, as a container, its items; modules are left alone."""
    if isinstance(value, Tensor):
        return True
    if depth == 0 or value is None or isinstance(value, (bool, int, float, complex, str, bytes, type, nn.Module)):
        return False
    items: list[Any] = []
    if isinstance(value, Mapping):
        items += value.values()
    elif isinstance(value, (list, tuple, AbstractSet)):
        items += value
    items += getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        items += [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    return any(_hides_tensors(item, depth - 1) for item in items)


def differentiable(values: Sequence[Any]) -> list[int]:
    """Indices of the tensors that require a gradient."""
    return [index for index, value in enumerate(values) if needs_gradient(value)]


def needs_gradient(value: Any) -> bool:
    """Whether it is a tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def can_have_gradient(value: Any) -> bool:
    """Whether it is a tensor of real or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def cut(values: Sequence[Any]) -> Values:
    """``values`` as leaves, each of which requires a gradient if the value does."""
    return tuple(
        [value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value for value in values]
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

    PyTorch's notes on autograd describe ``Tensor._version``, and torch.utils reads it, too. It has no public name. A
    tensor of inference mode does not count.
    """
    return [value._version if isinstance(value, Tensor) and not value.is_inference() else 0 for value in values]  # noqa: SLF001 - see above


def check_input(value: Any, device: torch.device | None) -> None:
    """Check what a caller hands to the pipeline.

    Args:
        value: the input of a batch.
        device: of the first partition; None if there is no partition, then any device is right.

    Raises:
        TypeError: neither a tensor nor a tuple of tensors.
        ValueError: a tensor without a batch dimension, unequal batch sizes, or another device than the first
            partition's.
    """
    values = value if isinstance(value, tuple) else (value,)
    foreign = [type(item).__name__ for item in values if not isinstance(item, Tensor)]
    if foreign or not values:
        got = f"a tuple with {', '.join(foreign)}" if isinstance(value, tuple) and foreign else type(value).__name__
        got = "an empty tuple" if not values else got
        raise TypeError(f"input must be a tensor or a tuple of tensors, got {got}; pass only tensors")
    if any(tensor.dim() == 0 for tensor in values):
        raise ValueError("input must have a batch dimension, got a tensor without dimensions; unsqueeze it")
    sizes = [tensor.size(0) for tensor in values]
    if len(set(sizes)) > 1:
        raise ValueError(f"tensors of an input must agree in dimension 0, got sizes {sizes}; pass one batch")
    for tensor in values:
        check_device("input", tensor, device)


def check_device(name: str, tensor: Tensor, device: torch.device | None) -> None:
    """Check that an input is where the first partition is.

    Raises:
        ValueError: it is elsewhere.
    """
    if device is not None and tensor.device != device:
        raise ValueError(
            f"{name} must be on the first partition's device {device}, got {tensor.device}; move it with "
            ".to(pipe.devices[0])"
        )


def scatter(value: Any, chunks: int) -> list[MicroBatch]:
    """Split a batch into at most ``chunks`` micro-batches along dimension 0.

    Sizes are those of :meth:`torch.Tensor.chunk`: equal but for a smaller last one, so a batch that does not divide
    evenly may give fewer micro-batches than asked for (272 in 32 gives 31). The pieces are views of the batch: a caller
    that writes to it before the backward pass gets autograd's error, as from the plain module.
    """
    batch = MicroBatch.wrap(value)
    aliased = aliased_values(batch.values)
    pieces = [tensor.chunk(chunks) for tensor in batch.values]
    return [MicroBatch(values, batch.structure, aliased) for values in zip(*pieces, strict=True)]


def gather(microbatches: Sequence[MicroBatch]) -> MicroBatch:
    """Concatenate results along dimension 0.

    Raises:
        TypeError: a result that holds something else than tensors.
        ValueError: a result without a batch dimension, of several micro-batches.
    """
    first = microbatches[0]
    for value in first.values:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"output of the last layer must be a tensor or a tuple of tensors, got {type(value).__name__}; "
                "return tensors from the last layer"
            )
    if len(microbatches) == 1:
        return first
    if any(value.dim() == 0 for microbatch in microbatches for value in microbatch.values):
        raise ValueError(
            "output of the last layer must have a batch dimension, got a tensor without dimensions for each of "
            f"{len(microbatches)} micro-batches; return a row per sample, and reduce them in the loss"
        )
    columns = zip(*(microbatch.values for microbatch in microbatches), strict=True)
    return MicroBatch(tuple(torch.cat(column) for column in columns), first.structure)
