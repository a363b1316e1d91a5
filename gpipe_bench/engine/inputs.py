"""Batches of several arguments: how a :class:`gpipe_bench.engine.pipe.Pipe` splits them and gathers its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpipe_bench.engine.microbatch import MicroBatch, aliased_values, check_device, flatten
from gpipe_bench.engine.sequential import Arguments
from gpipe_bench.skip.trees import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["NoChunk", "check_arguments_of_batch", "gather_values", "scatter_arguments", "split_sizes"]


class NoChunk:
    """Wraps a tensor that is not split: every micro-batch gets all of it, as in ``pipe(x, NoChunk(mask))``.

    Args:
        tensor: a tensor of any shape, on the device of the first partition.

    Raises:
        TypeError: ``tensor`` is not a tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"NoChunk must wrap a tensor, got {type(tensor).__name__}; pass anything else as it is: every "
                "micro-batch gets it"
            )
        self.tensor = tensor


def check_arguments_of_batch(args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device | None) -> None:
    """Check what a caller hands to the pipeline; without a partition any device is right."""
    named = {**{str(number): value for number, value in enumerate(args)}, **kwargs}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if not tensors:
        got = ", ".join(type(value).__name__ for value in named.values()) or "nothing"
        raise TypeError(f"inputs must hold at least one tensor to split, got {got}; pass the batch as a tensor")
    whole = {name: value.tensor for name, value in named.items() if isinstance(value, NoChunk)}
    for name, tensor in {**tensors, **whole}.items():
        check_device(f"input {name}", tensor, device)
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            raise ValueError(f"input {name} must have a batch dimension, got a tensor without; wrap it in NoChunk")


def scatter_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], chunks: int) -> list[MicroBatch]:
    """Split tensors into at most ``chunks`` pieces along dimension 0; everything else goes to every micro-batch."""
    values = [*args, *kwargs.values()]
    counts = sorted({len(value.chunk(chunks)) for value in values if isinstance(value, Tensor)})
    if len(counts) > 1:
        sizes = [value.size(0) for value in values if isinstance(value, Tensor)]
        raise ValueError(
            f"inputs must give equally many micro-batches, got sizes {sizes} in dimension 0, which give {counts}; pass "
            "one batch, and wrap in NoChunk what is not split"
        )
    whole = [value.tensor if isinstance(value, NoChunk) else value for value in values]
    pieces = [
        value.chunk(chunks) if isinstance(value, Tensor) else [uncut] * counts[0]
        for value, uncut in zip(values, whole, strict=True)
    ]
    batch, *microbatches = [
        flatten(Arguments(tuple(row[: len(args)]), dict(zip(kwargs, row[len(args) :], strict=True))))
        for row in (whole, *zip(*pieces, strict=True))
    ]
    aliased = aliased_values(batch[0])
    return [MicroBatch(*microbatch, aliased) for microbatch in microbatches]


def split_sizes(values: Sequence[Any], chunks: int) -> list[int]:
    """Sizes of the micro-batches that the first tensor among ``values`` gives."""
    first = next(value for value in values if isinstance(value, Tensor))
    return [piece.size(0) for piece in first.chunk(chunks)]


def gather_values(microbatches: Sequence[MicroBatch]) -> MicroBatch:
    """Put results together, item by item where they are tuples, lists or dicts.

    Tensors are concatenated along dimension 0, scalars stacked; anything else, be it a tuple of tensors, comes in a
    list with what each micro-batch gave (PyTorch 2.3, ``Pipe.forward``).
    """
    results = [_items(microbatch.unwrap()) for microbatch in microbatches]
    forms = list(dict.fromkeys(str(structure) for _, structure in results))
    if len(forms) > 1:
        raise TypeError(
            f"results of all micro-batches must have one form, got {forms}; return the same tuple from every one"
        )
    columns = zip(*(items for items, _ in results), strict=True)
    return MicroBatch(*flatten(tree_unflatten([_gathered(column) for column in columns], results[0][1])))


def _items(value: Any) -> tuple[list[Any], TreeSpec]:
    """What the outermost container holds, and its form."""
    return tree_flatten(value, is_leaf=lambda item: item is not value)


def _gathered(column: Sequence[Any]) -> Any:
    tensors = sum(isinstance(value, Tensor) for value in column)
    if 0 < tensors < len(column):
        kinds = sorted({type(value).__name__ for value in column})
        raise TypeError(
            f"results of all micro-batches must have one form, got {' and '.join(kinds)} in one place; return a tensor "
            "from every one, or from none"
        )
    if not tensors:
        return list(column)
    if any(tensor.dim() == 0 for tensor in column):
        return torch.stack(list(column))
    return torch.cat(list(column)) if len(column) > 1 else column[0]
