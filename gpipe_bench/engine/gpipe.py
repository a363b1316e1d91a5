"""GPipe: a pipeline that cuts an nn.Sequential into partitions and puts each on its device."""

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
    """Pipeline parallelism for an ``nn.Sequential``.

    The module is cut into partitions of consecutive layers, each on its device. A batch is split into micro-batches
    along dimension 0, and the partitions work on different micro-batches at the same time. Loss and gradients are
    those of the plain module (GPipe, arXiv 1811.06965; torchgpipe, arXiv 2004.09910).

    ::

        pipe = GPipe(nn.Sequential(a, b, c, d), balance=[2, 2], devices=["cuda:0", "cuda:1"], chunks=8)
        loss = criterion(pipe(x), y)     # x on pipe.devices[0], y on pipe.devices[-1]
        loss.backward()

    Parameters have the names that they have in ``module``, so the ``state_dict`` of one loads into the other.

    Args:
        module: the layers. They are moved to the devices in place.
        balance: layers per partition: positive integers whose sum is ``len(module)``. It must be given;
            ``gpipe_bench.balance`` has functions that find one.
        devices: the device of each partition, at least as many as partitions; a device may occur several times.
            Default: all CUDA devices.
        chunks: how many micro-batches a batch is split into, m. The split is that of :meth:`torch.Tensor.chunk`, so a
            batch may give fewer.
        checkpoint: which micro-batches keep no activations and are recomputed in the backward pass: ``always``, all;
            ``except_last``, all but the last; ``never``, none. In evaluation mode none is.
        deferred_batch_norm: whether batch normalization updates its running statistics once per batch, and not once
            per micro-batch. It replaces these layers in ``module``.
        components: which components of the engine are on; default: all.
        backward: what orders the backward pass: ``autograd``, PyTorch's engine; ``scheduled``, the reversed schedule,
            in which partitions on the CPU run at the same time, too.
        transfer: how tensors go from device to device: ``direct``; ``host``, through host memory, also between
            partitions that share a device.
        workers: which threads run the layers: ``always``, one thread per device, on the CPU one per partition;
            ``never``, the calling thread; ``auto``, what is faster in the first batches.

    Attributes:
        balance: layers per partition.
        devices: device of each partition.
        chunks: as above. It may be changed between batches, as may ``checkpoint`` and ``workers``.
        partitions: a list with one ``nn.Sequential`` per partition. Use ``pipe[i] = layer`` to replace a layer.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``, its skips do not match, or an argument has a wrong type.
        ValueError: a layer or a parameter occurs in two places of ``module``, or an argument has a wrong value.
        BalanceError: a ValueError; ``balance`` does not fit ``module``.
        DeviceCountError: an IndexError; there are fewer devices than partitions, or this machine lacks one of them.
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
            input: a tensor of shape (batch size, ...), or a tuple of such tensors, on ``devices[0]``. The first layer
                gets a tuple as one argument.

        Returns:
            What the last layer gives, on ``devices[-1]``: a tensor, or a tuple, list or dict of tensors. The results
            of the micro-batches are concatenated along dimension 0.

        Raises:
            TypeError: ``input``, or what the last layer gives, holds something else than tensors.
            ValueError: a tensor of ``input`` has no batch dimension, another batch size, or is on another device.
            Exception: a layer raised it. It keeps its traceback, and the pipeline can go on with the next batch.
        """
        self._settle()
        chunks = check_settings(self.chunks, self.checkpoint, self.workers)
        check_input(input, self.devices[0] if self.devices else None)
        if not self.partitions:
            return input
        return self._through(scatter(input, chunks), gather)
