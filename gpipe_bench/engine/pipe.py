"""Pipe: a pipeline over layers that stand on their devices already.

It takes the place of ``torch.distributed.pipeline.sync.Pipe``, which PyTorch removed in version 2.4 (pytorch#127354),
and follows its documentation (PyTorch 2.3, "Pipeline Parallelism"). It needs no RPC: there is one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import register_pytree_node

from gpipe_bench.components import Components
from gpipe_bench.engine.arguments import check_balance, check_collection, check_settings
from gpipe_bench.engine.inputs import check_arguments_of_batch, gather_values, scatter_arguments
from gpipe_bench.engine.pipeline import Pipeline
from gpipe_bench.engine.placed import placed_partitions, unwrapped
from gpipe_bench.engine.sequential import PipeSequential, check_outermost
from gpipe_bench.errors import BalanceError

__all__ = ["LocalValue", "Pipe"]


@dataclass(frozen=True)
class LocalValue:
    """The result of a :class:`Pipe`, with the methods of the remote reference that PyTorch's Pipe gave.

    A dataclass and a pytree, so that DistributedDataParallel finds the tensors in it, and puts back what it wraps.

    Attributes:
        value: what the last layer gave, on the device of the last partition.
    """

    value: Any

    def local_value(self) -> Any:
        """The value; nothing is sent."""
        return self.value

    def to_here(self, timeout: float = -1.0) -> Any:  # noqa: ARG002 - the signature of a remote reference
        """The value, which is here already."""
        return self.value


register_pytree_node(
    LocalValue,
    lambda result: ([result.value], None),
    lambda values, _: LocalValue(*values),
    serialized_type_name="gpipe_bench.LocalValue",
)


class Pipe(Pipeline):
    """Pipeline parallelism for an nn.Sequential whose layers the caller has put on devices.

    ::

        model = nn.Sequential(nn.Linear(16, 8).to("cuda:0"), nn.ReLU(), nn.Linear(8, 4).to("cuda:1"))
        pipe = Pipe(model, chunks=8)
        output = pipe(x).local_value()

    Consecutive layers on one device are one partition; layers without parameters follow their neighbours, see
    :func:`gpipe_bench.engine.placed.placed_partitions`. Parameters keep the names that they have in ``module``.

    Args:
        module: layers on their devices.
        chunks: micro-batches to split a batch into.
        checkpoint: ``always``, ``except_last`` (all but the last micro-batch) or ``never``; off in evaluation.
        deferred_batch_norm: update running statistics of batch normalisation once per batch; replaces these layers.
        balance: layers per partition, where consecutive layers on one device are to be several partitions (on a CPU);
            each partition must be on one device. Default: as the devices say.
        components: which components of the engine are on.
        transfer: how tensors cross partitions, ``direct`` or ``host``.
        workers: who runs the tasks, ``auto``, ``always`` or ``never``; see :class:`gpipe_bench.GPipe`.

    Attributes:
        balance: layers per partition.
        devices: device of each partition.
        chunks: see above; may be changed between batches, as may ``checkpoint`` and ``workers``.
        partitions: the layers of each partition.

    Raises:
        TypeError: ``module`` is not an nn.Sequential; skips do not match.
        ValueError: a child has parameters on two devices, a child or parameter occurs in two places, or ``chunks``,
            ``checkpoint`` or ``balance`` is wrong.
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
        transfer: str = "direct",
        workers: str = "auto",
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
            backward="autograd",
            transfer=transfer,
            workers=workers,
            container=PipeSequential,
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> LocalValue:
        """Run one batch through the pipeline.

        Args:
            inputs: for the first layer, on ``devices[0]``. Tensors, of shape (batch size, ...), are split along
                dimension 0; everything else goes to every micro-batch, tensors in a :class:`NoChunk` as a whole.
            kwargs: the same, by keyword.

        Returns:
            What the last layer gives: tensors concatenated along dimension 0, scalar tensors stacked, other values in a
            list with one item per micro-batch; where it gives a tuple, list or dict, for each item of it.

        Raises:
            TypeError: no tensor among the inputs.
            ValueError: a tensor has no batch dimension or is on another device, or numbers of micro-batches differ.
            Exception: what a layer raised, with its traceback; the pipeline stays usable.
        """
        self._settle()
        chunks = check_settings(self.chunks, self.checkpoint, self.workers)
        check_arguments_of_batch(inputs, kwargs, self.devices[0] if self.devices else None)
        if not self.partitions:
            return LocalValue(inputs[0] if len(inputs) == 1 else inputs)
        return LocalValue(self._through(scatter_arguments(inputs, kwargs, chunks), gather_values))


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
