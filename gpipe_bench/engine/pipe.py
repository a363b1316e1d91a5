"""Pipe: a pipeline over layers that are on their devices already.

It replaces ``torch.distributed.pipeline.sync.Pipe``, which PyTorch removed in version 2.4 (pytorch#127354), and follows
its documentation (PyTorch 2.3, "Pipeline Parallelism"). It does not need RPC: one process runs everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.autograd.microbatch import MicroBatch, aliased_values, check_device, flatten
from gpipe_bench.autograd.sequential import Arguments, PipeSequential, check_outermost
from gpipe_bench.components import Components
from gpipe_bench.engine.arguments import checked_module, split_layers
from gpipe_bench.engine.goal import Goal, Reduction
from gpipe_bench.engine.gpipe import check_shapes, other_forms
from gpipe_bench.engine.microbatches import Cut, MicroBatches, agreed_count, count_of, ready_made
from gpipe_bench.engine.module import PartitionedModule
from gpipe_bench.engine.paper.executor import PaperExecutor
from gpipe_bench.engine.pipeline import Executor, Pipeline
from gpipe_bench.engine.placed import placed_partitions, unwrapped
from gpipe_bench.engine.runtime.executor import RuntimeExecutor
from gpipe_bench.engine.runtime.lists import ScheduleLike, checked_schedule, ranks_of_partitions
from gpipe_bench.errors import BalanceError
from gpipe_bench.skip.trees import TreeSpec, register_pytree_node, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class LocalValue:
    """The result of a :class:`Pipe`, with the methods of the ``RRef`` that PyTorch's Pipe returns.

    It is a pytree, so DistributedDataParallel finds the tensors in it.

    Attributes:
        value: what the last layer gave, on the device of the last partition.
    """

    value: Any

    def local_value(self) -> Any:
        """The value."""
        return self.value

    def to_here(self, timeout: float = -1.0) -> Any:  # noqa: ARG002 - the signature of a remote reference
        """The value. It is in this process, so there is no timeout."""
        return self.value


register_pytree_node(
    LocalValue,
    lambda result: ([result.value], None),
    lambda values, _: LocalValue(*values),
    serialized_type_name="gpipe_bench.LocalValue",
)


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


class Pipe(PartitionedModule):
    """Pipeline parallelism for an ``nn.Sequential`` whose layers are on their devices already.

    Consecutive layers on one device are one partition. A layer without parameters runs where the layer before it runs;
    :class:`gpipe_bench.WithDevice` overrides this. Layers may take several inputs: what a layer gives as a tuple,
    the next layer gets as several inputs.

    ::

        model = nn.Sequential(nn.Linear(16, 8).to("cuda:0"), nn.ReLU(), nn.Linear(8, 4).to("cuda:1"))
        pipe = Pipe(model, chunks=8)
        output = pipe(x).local_value()

    Parameters have the names that they have in ``module``, so the ``state_dict`` of one loads into the other.

    Args:
        module: the layers, each on its device.
        chunks: how many micro-batches a batch is split into, m; a small batch may give fewer.
        checkpoint: ``always``, ``except_last`` or ``never``; see :class:`gpipe_bench.GPipe`, as for all below.
        deferred_batch_norm: whether batch normalization updates its running statistics once per batch.
        balance: layers per partition, to cut layers on one device into several partitions, as on a CPU. The layers of
            each partition must be on one device. Default: consecutive layers on one device are one partition.
        components: which components of the engine are on; default: all.
        schedule: with several partitions on each device the layers must be where the schedule has them. If they
            are all on one device, two partitions count as one device.
        transfer: ``direct`` or ``host``.
        workers: ``always`` or ``never``.

    Attributes:
        balance: layers per partition.
        devices: device of each partition.
        chunks: as above. It may be changed between batches, as may ``checkpoint`` and ``workers``.
        partitions: a list with one ``PipeSequential`` per partition. Use ``pipe[i] = layer`` to replace a layer.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``, its skips do not match, or an argument has a wrong type.
        ValueError: a layer is on two devices, a layer or a parameter occurs in two places of ``module``, or an argument
            has a wrong value.
        BalanceError: a ValueError; ``balance`` does not fit ``module`` or its devices.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        *,
        balance: list[int] | None = None,
        components: Components | None = None,
        schedule: ScheduleLike | Iterable[Iterable[tuple[str, int, int]]] | None = None,
        transfer: str = "direct",
        workers: str = "always",
    ) -> None:
        super().__init__(
            chunks=chunks,
            checkpoint=checkpoint,
            deferred_batch_norm=deferred_batch_norm,
            components=components,
            transfer=transfer,
            workers=workers,
        )
        check_outermost(module)
        sizes, devices = placed_partitions(module)
        module = unwrapped(module)
        if balance is not None:
            wanted = checked_module(module, balance)
            sizes, devices = wanted, _devices_of(wanted, sizes, devices)
        else:
            checked_module(module, sizes)
        chosen = checked_schedule(schedule)
        # Layers that are all on one device: a schedule with several partitions per device takes two for one.
        count = len(set(devices)) if len(set(devices)) > 1 else max(len(devices) // 2, 1)
        ranks = ranks_of_partitions(chosen, len(sizes), count)
        executor: Executor = PaperExecutor() if chosen is None else RuntimeExecutor(chosen, devices, ranks)
        self._pipeline = Pipeline(executor, ranks)
        found = split_layers(module, sizes, devices, PipeSequential, deferred_batch_norm=deferred_batch_norm)
        self.adopt_layers(*found, sizes, devices)

    def forward(self, *inputs: Any, **kwargs: Any) -> LocalValue:
        """Run one batch through the pipeline.

        Args:
            inputs: inputs of the first layer, at least one of them a tensor. Tensors of shape (batch size, ...) on
                ``devices[0]`` are split along dimension 0. Every micro-batch gets everything else as it is, and the
                whole tensor of a :class:`gpipe_bench.NoChunk`. Or :class:`gpipe_bench.MicroBatches` of each tensor
                that would be split.
            kwargs: keyword inputs of the first layer, treated alike.

        Returns:
            What the last layer gives, in a :class:`LocalValue` on ``devices[-1]``. Results of ready-made micro-batches
            come in a list as they are. Else the tensors of the micro-batches are concatenated along dimension 0, and
            scalar tensors are stacked. Other values come in a list with one
            item per micro-batch. If the layer gives a tuple, list or dict, this holds for each of its items.

        Raises:
            TypeError: no input is a tensor, or the micro-batches give results of different form.
            ValueError: a tensor has no batch dimension or is on another device, or tensors give different numbers of
                micro-batches.
            Exception: a layer raised it. It keeps its traceback, and the pipeline can go on with the next batch.
        """
        cut = self._cut(inputs, kwargs)
        if not self.partitions:
            return LocalValue(inputs[0] if len(inputs) == 1 else inputs)
        pipeline = self._pipeline
        return LocalValue(pipeline.executor.forward(pipeline.batch(self, cut)))

    def step(
        self,
        inputs: Any,
        target: Any,
        loss: Callable[..., Tensor],
        *,
        return_output: bool = False,
        reduction: Reduction = None,
        **kwargs: Any,
    ) -> Any:
        """Run one batch forward and backward; gradients are added to those of the parameters.

        Args:
            inputs: the input of the first layer, or a tuple of its inputs, as for :meth:`forward`.
            target: as for :meth:`gpipe_bench.GPipe.step`.
            loss: as for :meth:`gpipe_bench.GPipe.step`.
            return_output: whether to return the output, too.
            reduction: as for :meth:`gpipe_bench.GPipe.step`.
            kwargs: as for :meth:`forward`.

        Returns:
            The loss, or (loss, output), see :meth:`gpipe_bench.GPipe.step`; the output is no :class:`LocalValue`.
        """
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        return self._pipeline.step(self, self._cut(given, kwargs), Goal(target, loss, return_output, reduction))

    def _cut(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Cut:
        self.follow_replacements()
        device, chunks = self.devices[0] if self.devices else None, self.chunks
        if (m := _ready_made(inputs, kwargs)) is not None:
            rows = [
                Arguments(tuple(_part(each, i) for each in inputs), {key: _part(kwargs[key], i) for key in kwargs})
                for i in range(m)
            ]
            return ready_made(rows, device)
        check_inputs(inputs, kwargs, device)
        first = next(value for value in (*inputs, *kwargs.values()) if isinstance(value, Tensor))
        sizes = [piece.size(0) for piece in first.chunk(chunks)]
        return Cut(scatter_arguments(inputs, kwargs, chunks), sizes, chunks, gather_values)


def _ready_made(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """How many ready-made micro-batches the arguments hold; None if there are none."""
    named = {**{str(number): value for number, value in enumerate(args)}, **kwargs}
    cut = {name: value for name, value in named.items() if isinstance(value, Tensor | MicroBatches)}
    return agreed_count({f"input {name}": count_of(value) for name, value in cut.items()})


def _part(value: Any, i: int) -> Any:
    """What micro-batch i, a ready-made one, gets of an argument."""
    if isinstance(value, MicroBatches):
        return value.values[i]
    return value.tensor if isinstance(value, NoChunk) else value


def _devices_of(balance: list[int], sizes: list[int], devices: list[torch.device]) -> list[torch.device]:
    """The device of each partition of ``balance``, where layers stand on ``devices``, ``sizes`` of them on each."""
    per_layer = [device for size, device in zip(sizes, devices, strict=True) for _ in range(size)]
    ends = list(accumulate(balance))
    for j, (size, end) in enumerate(zip(balance, ends, strict=True)):
        several = sorted({str(device) for device in per_layer[end - size : end]})
        if len(several) > 1:
            raise BalanceError(
                f"balance must cut where devices change, got partition {j} on {', '.join(several)}; cut it "
                f"there, as in {sizes}"
            )
    return [per_layer[end - 1] for end in ends]


def check_inputs(args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device | None) -> None:
    """Check what a caller hands to the pipeline; without a partition any device is right."""
    named = {**{str(number): value for number, value in enumerate(args)}, **kwargs}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if not tensors:
        got = ", ".join(type(value).__name__ for value in named.values()) or "nothing"
        advice = "pass the batch as a tensor, or a list of ready-made micro-batches as MicroBatches"
        raise TypeError(f"inputs must hold at least one tensor to split, got {got}; {advice}")
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


def gather_values(microbatches: Sequence[MicroBatch]) -> MicroBatch:
    """Put results together, item by item where they are tuples, lists or dicts.

    Tensors are concatenated along dimension 0, scalars stacked; anything else, be it a tuple of tensors, comes in a
    list with what each micro-batch gave (PyTorch 2.3, ``Pipe.forward``).
    """
    results = [_items(microbatch.unwrap()) for microbatch in microbatches]
    forms = [structure for _, structure in results]
    if any(form != forms[0] for form in forms):
        raise other_forms(forms)
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
    try:
        return torch.cat(list(column)) if len(column) > 1 else column[0]
    except RuntimeError:
        check_shapes(column)
        raise
