"""GPipe: an nn.Sequential trained in micro-batches over partitions, each on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from gpipe_bench.components import Components
from gpipe_bench.engine.arguments import check_settings
from gpipe_bench.engine.microbatch import check_input, gather, scatter
from gpipe_bench.engine.pipeline import Device, Pipeline

__all__ = ["GPipe"]


class GPipe(Pipeline):
    """Pipeline parallelism for an nn.Sequential.

    ::

        pipe = GPipe(nn.Sequential(a, b, c, d), balance=[2, 2], devices=["cuda:0", "cuda:1"], chunks=8)
        loss = criterion(pipe(x), y)     # x on pipe.devices[0], y on pipe.devices[-1]
        loss.backward()

    Parameters keep the names that they have in ``module``, so checkpoints of one load into the other.

    Args:
        module: layers to split; moved to the devices in place.
        balance: layers per partition; default: see ``gpipe_bench.balance``.
        devices: one per partition, more are ignored; may repeat. Default: all CUDA devices.
        chunks: micro-batches to split a batch into, m. A batch that does not divide evenly, or is smaller, gives fewer.
        checkpoint: ``always``, ``except_last`` (all but the last micro-batch) or ``never``; off in evaluation.
        deferred_batch_norm: update running statistics of batch normalisation once per batch; replaces these layers.
        components: which components of the engine are on.
        backward: what drives the backward pass: ``autograd``, or ``scheduled``, the reversed schedule, which each
            partition's worker carries out; then partitions on the CPU run backward at the same time too.
        transfer: how tensors cross partitions; ``direct``, or ``host`` through host memory, which makes partitions
            that share a device exchange real traffic, each on a compute stream of its own.
        workers: who runs the tasks: ``always`` a thread per device (per partition on the CPU), ``never`` any but the
            calling thread, or ``auto``, whichever the first batches show to be faster; small layers run in the caller.

    Attributes:
        balance: layers per partition.
        devices: device of each partition.
        chunks: see above; may be changed between batches, as may ``checkpoint`` and ``workers``.
        partitions: the layers of each partition.

    Raises:
        TypeError: ``module`` is not an nn.Sequential; skips do not match; a device is no name of one; a flag is none.
        ValueError: a child or parameter occurs in two places; balance, chunks, checkpoint, a device or
            a mode is wrong.
        IndexError: fewer devices than partitions, or one that is not on this machine.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | None = None,
        *,
        devices: Sequence[Device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        components: Components | None = None,
        backward: str = "autograd",
        transfer: str = "direct",
        workers: str = "auto",
    ) -> None:
        super().__init__(
            module,
            balance,
            devices=devices,
            chunks=chunks,
            checkpoint=checkpoint,
            deferred_batch_norm=deferred_batch_norm,
            components=components,
            backward=backward,
            transfer=transfer,
            workers=workers,
        )

    def forward(self, input: Any) -> Any:  # noqa: A002 - its name in every nn.Module
        """Run one batch through the pipeline.

        Args:
            input: a tensor, or a tuple of tensors, of shape (batch size, ...) on ``devices[0]``.

        Returns:
            The same of what the last layer gives, on ``devices[-1]``.

        Raises:
            TypeError: ``input`` is something else.
            ValueError: it has no batch dimension, unequal batch sizes, or is on another device.
            Exception: what a layer raised, with its traceback; the pipeline stays usable.
        """
        self._settle()
        chunks = check_settings(self.chunks, self.checkpoint, self.workers)
        check_input(input, self.devices[0] if self.devices else None)
        if not self.partitions:
            return input
        return self._through(scatter(input, chunks), gather)
