"""Micro-batches: splitting a batch along its first dimension, and putting the results together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["MicroBatch", "Values", "check_input", "differentiable", "gather", "replace", "scatter"]

Values = tuple[Any, ...]
"""The tensors, and whatever else, that go from layer to layer."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one layer hands to the next.

    Attributes:
        values: the tensor or tensors, each of shape (micro-batch size, ...).
        atomic: whether layers see a single tensor rather than a tuple.
    """

    values: Values
    atomic: bool

    @classmethod
    def wrap(cls, value: Any) -> MicroBatch:
        """From what a layer takes or gives."""
        return cls(value, atomic=False) if isinstance(value, tuple) else cls((value,), atomic=True)

    def unwrap(self) -> Any:
        """To what a layer takes or gives."""
        return self.values[0] if self.atomic else self.values


def differentiable(values: Sequence[Any]) -> list[int]:
    """Indices of the tensors that require a gradient."""
    return [index for index, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad]


def replace(values: Values, indices: Sequence[int], tensors: Sequence[Tensor]) -> Values:
    """``values`` with ``tensors`` at ``indices``."""
    changed = list(values)
    for index, tensor in zip(indices, tensors, strict=True):
        changed[index] = tensor
    return tuple(changed)


def check_input(value: Any, device: torch.device) -> None:
    """Check what a caller hands to the pipeline.

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
    elsewhere = sorted({str(tensor.device) for tensor in values if tensor.device != device})
    if elsewhere:
        raise ValueError(
            f"input must be on the first partition's device {device}, got {', '.join(elsewhere)}; move it with "
            "input.to(pipe.devices[0])"
        )


def scatter(value: Any, chunks: int) -> list[MicroBatch]:
    """Split a batch into at most ``chunks`` micro-batches along dimension 0.

    Sizes are those of :meth:`torch.Tensor.chunk`: equal but for a smaller last one, so a batch that does not divide
    evenly may give fewer micro-batches than asked for (272 in 32 gives 31).
    """
    batch = MicroBatch.wrap(value)
    pieces = [tensor.chunk(chunks) for tensor in batch.values]
    return [MicroBatch(values, batch.atomic) for values in zip(*pieces, strict=True)]


def gather(microbatches: Sequence[MicroBatch]) -> MicroBatch:
    """Concatenate results along dimension 0.

    Raises:
        TypeError: a result that is neither a tensor nor a tuple of tensors.
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
    columns = zip(*(microbatch.values for microbatch in microbatches), strict=True)
    return MicroBatch(tuple(torch.cat(column) for column in columns), first.atomic)
