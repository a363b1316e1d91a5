"""The end of a pipeline in ``pipe.step``: a loss for each micro-batch, as soon as its outputs are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipe_bench.autograd.microbatch import MicroBatch
from gpipe_bench.autograd.nodes import Inlet, receive
from gpipe_bench.engine.batch import BatchContext
from gpipe_bench.engine.randomness import Draws
from gpipe_bench.engine.runtime.reduction import Reduction, reduced
from gpipe_bench.engine.transfer import use_stream
from gpipe_bench.skip.trees import tree_flatten, tree_leaves, tree_unflatten


class Goal(NamedTuple):
    """What a step is to minimise; see :meth:`gpipe_bench.GPipe.step`."""

    target: Any
    loss: Any
    return_output: bool = False
    reduction: Reduction = None

    def split(self, chunks: int, sizes: Sequence[int]) -> list[Any]:
        """The target of each micro-batch."""
        if not callable(self.loss):
            raise TypeError(
                f"loss must be a function of (output, target), got {self.loss!r:.60}; pass one, such as mse_loss"
            )
        return split_targets(self.target, chunks, sizes)

    def shared(self, chunks: int, sizes: Sequence[int], *, learning: bool) -> tuple[Any, list[Any], Sequence[float]]:
        """The loss to compute for each micro-batch, the targets of these, and by what each result is multiplied."""
        targets = self.split(chunks, sizes)
        if learning:
            check_target(self.target)
        loss, shares = reduced(self.loss, self.reduction, self.target, targets, sizes)
        return loss, targets, shares


class Losses:
    """Computes losses and their gradients, on the compute stream of the last partition.

    Attributes:
        outputs: of the micro-batches, without a graph, if they are kept.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor],
        targets: Sequence[Any],
        shares: Sequence[float],
        batch: BatchContext,
        *,
        keeps: bool,
    ) -> None:
        self.outputs = [MicroBatch((), None)] * len(targets)
        self._loss, self._targets, self._shares = loss, list(targets), shares
        self._execution, self._stream, self._keeps = batch.execution, batch.streams[-1][0].computing, keeps
        self._turns, self._j, self._randomness = batch.turns, len(batch.partitions), batch.randomness
        self._values: list[Tensor | None] = [None] * len(targets)
        # Losses with their graph, and where the gradients of the outputs arrive, until the backward pass.
        self._open: dict[int, tuple[Tensor | None, Inlet]] = {}

    def take(self, i: int, microbatch: MicroBatch) -> None:
        """Compute the loss of micro-batch i, if it counts."""
        target, self._targets[i] = self._targets[i], None
        with use_stream(self._stream), self._execution.applied():
            values, inlet, _ = receive(microbatch.values)
            loss = None
            if self._shares[i]:
                output = MicroBatch(values, microbatch.structure).unwrap()
                draws = Draws(self._randomness, i, self._j).first_pass(again=False)
                with draws, self._turns.turn(self._j):
                    loss = check_loss(self._loss(output, target)) * self._shares[i]
                self._values[i] = loss.detach()
        self._open[i] = loss, inlet
        if self._keeps:
            values = tuple([value.detach() if isinstance(value, Tensor) else value for value in microbatch.values])
            self.outputs[i] = MicroBatch(values, microbatch.structure)

    def grads(self, i: int) -> list[Tensor | None]:
        """Gradients of the outputs of micro-batch i."""
        loss, inlet = self._open.pop(i)
        if loss is None or not loss.requires_grad:
            return inlet.spread(())
        with use_stream(self._stream), self._turns.turn(self._j):
            return inlet.collect(torch.autograd.backward, loss)

    def total(self) -> Tensor:
        """The loss of the batch."""
        with use_stream(self._stream):
            values = [value for value in self._values if value is not None]
            return torch.stack(values).sum()


def check_loss(loss: Any) -> Tensor:
    """A loss of one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:60]
        raise TypeError(f"loss must give one number in a tensor, got {got}; take its mean")
    return loss.reshape(())


def check_target(target: Any) -> None:
    """Check that the losses of micro-batches, which run backward one by one, share no graph."""
    if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in tree_leaves(target)):
        raise ValueError(
            "target must have no graph where a schedule runs backward once per micro-batch, got a tensor computed from "
            "tensors that require gradients; pass target.detach(), or leave out the schedule"
        )


def split_targets(target: Any, chunks: int, sizes: Sequence[int]) -> list[Any]:
    """The target of each micro-batch.

    Tensors are split as the batch was. A list has an item per sample; a tuple or a dict has several targets. None goes
    to all micro-batches.

    Raises:
        ValueError: a tensor or a list has another batch size.
        TypeError: something else may have an item per sample, or not.
    """
    rows, ends = sum(sizes), list(accumulate(sizes))

    def is_leaf(value: Any) -> bool:
        """Also a collection that has an item per sample, or looks so."""
        if isinstance(value, tuple):
            return len(value) == rows and all(isinstance(each, tuple | dict) for each in value)
        return isinstance(value, list | deque)

    leaves, structure = tree_flatten(target, is_leaf=is_leaf)
    columns: list[Sequence[Any]] = []
    for leaf in leaves:
        is_tensor = isinstance(leaf, Tensor) and leaf.dim() > 0
        if (is_tensor or isinstance(leaf, list)) and len(leaf) != rows:
            got = f"a {'tensor' if is_tensor else 'list'} of {len(leaf)}"
            raise ValueError(f"target must have the input's batch size {rows}, got {got}; pass one batch, and several "
                             "targets in a tuple or a dict")  # fmt: skip
        if is_tensor:
            columns.append(leaf.chunk(chunks))
        elif isinstance(leaf, list):
            columns.append([leaf[end - size : end] for size, end in zip(sizes, ends, strict=True)])
        elif leaf is None:
            columns.append((None,) * len(sizes))
        else:
            raise _not_split(leaf)
    return [tree_unflatten([column[i] for column in columns], structure) for i in range(len(sizes))]


def _not_split(value: Any) -> TypeError:
    """Refuses a part of a target that is neither a tensor with a row per sample nor a list."""
    got = type(value).__name__
    if isinstance(value, tuple):
        got = f"a tuple of {len(value)} tuples or dicts for as many samples"
    elif isinstance(value, Tensor):
        got = "a tensor without rows"
    return TypeError(
        f"target must hold tensors with a row per sample, and lists with an item per sample, got {got}; pass one of "
        "these, several targets in a dict, and constants to the loss by functools.partial"
    )
