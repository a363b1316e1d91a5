"""A batch in micro-batches: cut by the pipeline along dimension 0, or ready-made.

Packed sequences cannot be cut: where one ends and the next begins stands in a tensor of its own, whose rows are not
those of the batch. So a caller may hand over the micro-batches themselves, as to the plain module in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpipe_bench.autograd.microbatch import MicroBatch, aliased_values, check_device, flatten


class MicroBatches:
    """Ready-made micro-batches, in the place of a batch that the pipeline would cut.

    ::

        loss = pipe.step(MicroBatches([x0, x1, x2]), MicroBatches([y0, y1, y2]), criterion)

    A call has m micro-batches then, whatever ``chunks`` is, and gives a list of m outputs. They may differ in shape.
    Loss and gradients are those of a loop over them with the plain module, in which the losses are weighted as
    ``reduction`` of :meth:`gpipe_bench.GPipe.step` says; the size of a micro-batch is dimension 0 of its first tensor
    that has dimensions.

    Args:
        values: for each micro-batch what stands for this argument: an input as :class:`gpipe_bench.GPipe` takes it, any
            value for an argument of a :class:`gpipe_bench.Pipe`, or what the loss takes as its target.

    Attributes:
        values: as above.

    Raises:
        TypeError: ``values`` is neither a list nor a tuple.
        ValueError: it is empty.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        if not isinstance(values, list | tuple):
            raise TypeError(
                f"MicroBatches must be given a list with a value per micro-batch, got {type(values).__name__}; pass a "
                "batch that the pipeline is to cut as it is"
            )
        if not values:
            raise ValueError("MicroBatches must hold at least one micro-batch, got an empty list; leave out the call")
        self.values = list(values)


@dataclass(slots=True)
class Cut:
    """A batch in micro-batches.

    Attributes:
        microbatches: of the batch, if its first partition is in this process. An executor empties the list.
        sizes: how many samples each has.
        chunks: how many there are at most; None if they are ready-made.
        gather: puts the results of micro-batches together.
    """

    microbatches: list[MicroBatch]
    sizes: Sequence[int]
    chunks: int | None
    gather: Callable[[list[MicroBatch]], MicroBatch]


def count_of(value: Any) -> int | None:
    """How many ready-made micro-batches a value holds; None if the pipeline is to cut it."""
    return len(value.values) if isinstance(value, MicroBatches) else None


def agreed_count(counts: Mapping[str, int | None]) -> int | None:
    """The count of micro-batches that :func:`count_of` gives for each of some arguments.

    Raises:
        ValueError: the arguments differ.
    """
    if len(set(counts.values())) > 1:
        got = ", ".join(f"{'a batch' if count is None else count} for {name}" for name, count in counts.items())
        raise ValueError(
            "ready-made micro-batches must be given for every argument that would be cut, the same number for each, "
            f"got {got}; wrap a list with a value per micro-batch in MicroBatches, or pass batches alone"
        )
    return next(iter(counts.values()), None)


def ready_made(values: Sequence[Any], device: torch.device | None) -> Cut:
    """Micro-batches as a caller made them; without a partition any device is right."""
    microbatches, sizes = [], []
    for i, value in enumerate(values):
        flat, structure = flatten(value)
        tensors = [each for each in flat if isinstance(each, Tensor)]
        for tensor in tensors:
            check_device(f"input of micro-batch {i}", tensor, device)
        size = next((tensor.size(0) for tensor in tensors if tensor.dim()), None)
        if size is None:
            got = ", ".join(type(each).__name__ for each in flat) or "nothing"
            raise ValueError(
                f"micro-batch {i} must hold a tensor with a row per sample, got {got}; pass what the first layer takes"
            )
        microbatches.append(MicroBatch(flat, structure, aliased_values(flat)))
        sizes.append(size)
    return Cut(microbatches, sizes, None, in_list)


def in_list(microbatches: Sequence[MicroBatch]) -> MicroBatch:
    """The results of micro-batches as they are, in a list."""
    return MicroBatch(*flatten([microbatch.unwrap() for microbatch in microbatches]))
