"""Pipe: a pipeline over layers that are on their devices already.

It replaces ``torch.distributed.pipeline.sync.Pipe``, which PyTorch removed in version 2.4 (pytorch#127354), and follows
its documentation (PyTorch 2.3, "Pipeline Parallelism"). It does not need RPC: one process runs everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.components import Components
from gpipe_bench.engine.arguments import check_balance, check_collection, check_settings
from gpipe_bench.engine.inputs import check_arguments_of_batch, gather_values, scatter_arguments, split_sizes
from gpipe_bench.engine.microbatch import MicroBatch
from gpipe_bench.engine.pipeline import Pipeline
from gpipe_bench.engine.placed import placed_partitions, unwrapped
from gpipe_bench.engine.runtime.lists import ScheduleLike
from gpipe_bench.engine.sequential import PipeSequential, check_outermost
from gpipe_bench.errors import BalanceError
from gpipe_bench.skip.trees import register_pytree_node

__all__ = ["LocalValue", "Pipe"]


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


class Pipe(Pipeline):
    """Pipeline parallelism for an ``nn.Sequential`` whose layers are on their devices already.

    Consecutive layers on one device are one partition. A layer without parameters runs where the layer before it runs;
    :class:`gpipe_bench.pipe.WithDevice` overrides this. Layers may take several inputs: what a layer gives as a tuple,
    the next layer gets as several inputs.

    ::

        model = nn.Sequential(nn.Linear(16, 8).to("cuda:0"), nn.ReLU(), nn.Linear(8, 4).to("cuda:1"))
        pipe = Pipe(model, chunks=8)
        output = pipe(x).local_value()

    Parameters have the names that they have in ``module``, so the ``state_dict`` of one loads into the other.

    Args:
        module: the layers, each on its device.
        chunks: how many micro-batches a batch is split into, m; a small batch may give fewer.
        checkpoint: which micro-batches are recomputed in the backward pass: ``always``, all; ``except_last``, all but
            the last; ``never``, none. In evaluation mode none is.
        deferred_batch_norm: whether batch normalization updates its running statistics once per batch, and not once
            per micro-batch. It replaces these layers.
        balance: layers per partition, to cut layers on one device into several partitions, as on a CPU. The layers of
            each partition must be on one device. Default: consecutive layers on one device are one partition.
        components: which components of the engine are on; default: all.
        schedule: as for :class:`gpipe_bench.GPipe`. With ``interleaved``, ``zb_v`` and ``v_half`` the layers must be
            where the schedule has them. If they are all on one device, two partitions count as one device.
        transfer: how tensors go from device to device, ``direct`` or ``host``; see :class:`gpipe_bench.GPipe`.
        workers: which threads run the layers, ``always`` or ``never``; see :class:`gpipe_bench.GPipe`.

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

    _container = PipeSequential
    _is_placed = True

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
        check_outermost(module)
        sizes, devices = placed_partitions(module)
        balance = check_collection("balance", balance, "a list of layers per partition, such as [2, 2]")
        if balance is not None:
            balance = check_balance(module, balance)
            devices = _devices_of(balance, sizes, devices)
        super().__init__(
            unwrapped(module),
            sizes if balance is None else balance,
            devices=devices,
            chunks=chunks,
            checkpoint=checkpoint,
            deferred_batch_norm=deferred_batch_norm,
            components=components,
            schedule=schedule,
            transfer=transfer,
            workers=workers,
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> LocalValue:
        """Run one batch through the pipeline.

        Args:
            inputs: inputs of the first layer, at least one of them a tensor. Tensors of shape (batch size, ...) on
                ``devices[0]`` are split along dimension 0. Every micro-batch gets everything else as it is, and the
                whole tensor of a :class:`gpipe_bench.pipe.NoChunk`.
            kwargs: keyword inputs of the first layer, treated alike.

        Returns:
            What the last layer gives, in a :class:`LocalValue` on ``devices[-1]``. The tensors of the micro-batches
            are concatenated along dimension 0, and scalar tensors are stacked. Other values come in a list with one
            item per micro-batch. If the layer gives a tuple, list or dict, this holds for each of its items.

        Raises:
            TypeError: no input is a tensor, or the micro-batches give results of different form.
            ValueError: a tensor has no batch dimension or is on another device, or tensors give different numbers of
                micro-batches.
            Exception: a layer raised it. It keeps its traceback, and the pipeline can go on with the next batch.
        """
        microbatches = self._scattered(inputs, kwargs)
        if not self.partitions:
            return LocalValue(inputs[0] if len(inputs) == 1 else inputs)
        return LocalValue(self._forward(microbatches, gather_values))

    def step(self, inputs: Any, target: Any, loss: Callable[[Any, Any], Tensor], *, return_output: bool = False) -> Any:
        """Run one batch forward and backward; gradients are added to those of the parameters.

        Args:
            inputs: the input of the first layer, or a tuple of its inputs, as for :meth:`forward`.
            target: as for :meth:`gpipe_bench.GPipe.step`.
            loss: as for :meth:`gpipe_bench.GPipe.step`.
            return_output: whether to return the output, too.

        Returns:
            The loss, or (loss, output), see :meth:`gpipe_bench.GPipe.step`; the output is no :class:`LocalValue`.
        """
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        microbatches = self._scattered(given, {})
        if not self.partitions:
            raise ValueError("pipe must have a layer to train, got an empty nn.Sequential; add layers")
        sizes = split_sizes(given, self.chunks)
        return self._step(microbatches, sizes, target, loss, gather_values, return_output=return_output)

    def _scattered(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> list[MicroBatch]:
        self._settle()
        chunks = check_settings(self.chunks, self.checkpoint, self.workers)
        check_arguments_of_batch(inputs, kwargs, self.devices[0] if self.devices else None)
        return scatter_arguments(inputs, kwargs, chunks)


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
