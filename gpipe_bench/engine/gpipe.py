"""GPipe: a pipeline that cuts an nn.Sequential into partitions and puts each on its device.

A batch is split along its first dimension, and the results of the micro-batches are concatenated again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.autograd.microbatch import MicroBatch, aliased_values, check_device, flatten
from gpipe_bench.components import Components
from gpipe_bench.engine.arguments import (
    check_collection,
    checked_module,
    cuda_devices,
    resolve_devices,
    split_layers,
)
from gpipe_bench.engine.goal import Goal, Reduction
from gpipe_bench.engine.microbatches import Cut, MicroBatches, ready_made
from gpipe_bench.engine.module import Device, PartitionedModule
from gpipe_bench.engine.paper.executor import PaperExecutor
from gpipe_bench.engine.pipeline import Executor, Pipeline
from gpipe_bench.engine.runtime.executor import RuntimeExecutor
from gpipe_bench.engine.runtime.lists import ScheduleLike, checked_schedule, ranks_of_partitions
from gpipe_bench.schedules.table import check_device_count


class GPipe(PartitionedModule):
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
            per micro-batch. It replaces these layers in ``module``, which may derive from PyTorch's. Any other layer
            with running statistics is refused.
        components: which components of the engine are on; default: all. With a schedule, ``fork_join`` has nothing to
            switch: the schedule orders the backward pass.
        schedule: None for the paper's executor, in which autograd orders the backward pass. Else the runtime carries
            out a schedule: one of :data:`gpipe_bench.schedules.SCHEDULES`, the path of a CSV file, a
            :class:`gpipe_bench.schedules.Schedule`, a list of (kind, i, j) per device, or a function from (m, n) to a
            schedule. With ``interleaved``, ``interleaved_zb``, ``looped_bfs``, ``zb_v``, ``v_half``, ``v_min`` and
            ``dualpipe_v`` each device has several partitions: ``devices`` has one entry per device, ``balance`` v
            entries for each of them.
        transfer: how tensors go from device to device: ``direct``; ``host``, through host memory, also where several
            devices of the pipeline are one device of the machine.
        workers: which threads run the layers: ``always``, one thread per accelerator, and on the CPU one per
            partition, or one per device of the schedule; ``never``, the calling thread.

    Attributes:
        balance: layers per partition.
        devices: device of each partition.
        chunks: as above. It may be changed between batches, as may ``checkpoint`` and ``workers``.
        partitions: a list with one ``nn.Sequential`` per partition. Use ``pipe[i] = layer`` to replace a layer.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``, its skips do not match, or an argument has a wrong type.
        ValueError: a layer or a parameter occurs in two places of ``module``, or an argument has a wrong value.
        BalanceError: a ValueError; ``balance`` does not fit ``module``.
        DeviceCountError: an IndexError; there are fewer devices than partitions, or this machine lacks one of them; or
            more than a schedule with several partitions per device can use.
        ScheduleError: a ValueError; the schedule does not exist, or not for these partitions and devices.
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
        sizes = checked_module(module, balance)
        chosen = checked_schedule(schedule)
        given = check_collection("devices", devices, "a list of devices, one per partition, such as ['cuda:0']")
        count = len(cuda_devices() if given is None else given)
        ranks = ranks_of_partitions(chosen, len(sizes), count)
        check_device_count(ranks, count)
        # One entry for each device of the schedule, or one for each partition.
        entries = ranks if len(set(ranks)) < len(ranks) else range(len(ranks))
        found = resolve_devices(given, max(entries, default=-1) + 1, len(ranks))
        placed = [found[entry] for entry in entries]
        executor: Executor = PaperExecutor() if chosen is None else RuntimeExecutor(chosen, placed, ranks)
        self._pipeline = Pipeline(executor, ranks)
        self.adopt_layers(*split_layers(module, sizes, placed, deferred_batch_norm=deferred_batch_norm), sizes, placed)

    def forward(self, input: Any) -> Any:  # noqa: A002 - its name in every nn.Module
        """Run one batch through the pipeline.

        Args:
            input: a tensor of shape (batch size, ...), or a tuple of such tensors, on ``devices[0]``. The first layer
                gets a tuple as one argument. Or :class:`gpipe_bench.MicroBatches` of tensors or tuples.

        Returns:
            What the last layer gives, on ``devices[-1]``: a tensor, or a tuple, list or dict of tensors. The results
            of the micro-batches are concatenated along dimension 0; those of ready-made ones come in a list.

        Raises:
            TypeError: ``input``, or what the last layer gives, holds something else than tensors.
            ValueError: a tensor of ``input`` has no batch dimension, another batch size, or is on another device; or
                what the last layer gives has no batch dimension, or other shapes for other micro-batches.
            Exception: a layer raised it. It keeps its traceback, and the pipeline can go on with the next batch.
        """
        cut = self._cut(input)
        if not self.partitions:
            return input.values if isinstance(input, MicroBatches) else input
        pipeline = self._pipeline
        return pipeline.executor.forward(pipeline.batch(self, cut))

    def step(
        self,
        input: Any,  # noqa: A002 - as in forward
        target: Any,
        loss: Callable[[Any, Any], Tensor],
        *,
        return_output: bool = False,
        reduction: Reduction = None,
    ) -> Any:
        """Run one batch forward and backward; gradients are added to those of the parameters.

        The loss of a micro-batch is computed as soon as its output is there, so a schedule may begin its backward pass
        before the last forward pass.

        Args:
            input: as for :meth:`forward`.
            target: a tensor of shape (batch size, ...) on ``devices[-1]``, a list with an item per sample, or a tuple
                or dict of these. Parts of it may be None. If the input is :class:`gpipe_bench.MicroBatches`, the target
                is one, too, with a target for each micro-batch, or None.
            loss: gives one number from (output, target). The paper's executor calls it once, with the whole batch,
                unless its micro-batches are ready-made; a schedule calls it with each micro-batch.
            return_output: whether to return the output, too.
            reduction: how ``loss`` reduces a batch, so that losses of micro-batches give the loss and gradients of the
                whole batch. ``mean``: over samples; micro-batches are weighted by their sizes. ``sum``: losses are
                added. A function: gives the weight of a micro-batch in the mean from its target, a number, as in
                ``lambda target: int((target != 0).sum())``; micro-batches of weight 0 are left out. Default: known
                for the losses of ``torch.nn`` and ``torch.nn.functional``; any other loss counts as ``mean``, and a
                :class:`gpipe_bench.errors.ReductionWarning` says so.

        Returns:
            The loss, a tensor without dimensions and without a graph, on ``devices[-1]``; or (loss, output). Where grad
            mode is off nothing runs backward.

        Raises:
            TypeError: as for :meth:`forward`, or ``loss`` does not give one number, or ``target`` holds something else.
            ValueError: as for :meth:`forward`, or ``target`` has another batch size or, with a schedule, a graph; or
                ``reduction`` has a wrong value, or is not that of one of PyTorch's losses.
            Exception: a layer or ``loss`` raised it. Gradients of the micro-batches before may have been added by
                then: call ``pipe.zero_grad()`` before the next batch.
        """
        return self._pipeline.step(self, self._cut(input), Goal(target, loss, return_output, reduction))

    def _cut(self, value: Any) -> Cut:
        self.follow_replacements()
        return cut_input(value, self.chunks, self.devices[0] if self.devices else None)


def cut_input(value: Any, chunks: int, device: torch.device | None) -> Cut:
    """Cut an input into ``chunks`` micro-batches; ready-made micro-batches stay as they are.

    ``device`` is where the input must be. None: the pipeline has no partitions, so its device does not matter.
    """
    ready = isinstance(value, MicroBatches)
    for each in value.values if ready else [value]:
        values = each if isinstance(each, tuple) else (each,)
        foreign = [type(item).__name__ for item in values if not isinstance(item, Tensor)]
        if foreign or not values:
            got = f"a tuple with {', '.join(foreign)}" if isinstance(each, tuple) and foreign else type(each).__name__
            got = "an empty tuple" if not values else got
            advice = "pass only tensors, and wrap a list of ready-made micro-batches in MicroBatches"
            raise TypeError(f"input must be a tensor or a tuple of tensors, got {got}; {advice}")
    if ready:
        return ready_made(value.values, device)
    if any(tensor.dim() == 0 for tensor in values):
        raise ValueError("input must have a batch dimension, got a tensor without dimensions; unsqueeze it")
    sizes = [tensor.size(0) for tensor in values]
    if len(set(sizes)) > 1:
        raise ValueError(f"tensors of an input must agree in dimension 0, got sizes {sizes}; pass one batch")
    for tensor in values:
        check_device("input", tensor, device)
    return Cut(*scatter(value, chunks), chunks, gather)


def scatter(value: Any, chunks: int) -> tuple[list[MicroBatch], list[int]]:
    """Split a batch into at most ``chunks`` micro-batches along dimension 0; gives their sizes, too.

    Sizes are those of :meth:`torch.Tensor.chunk`: equal but for a smaller last one, so a batch that does not divide
    evenly may give fewer micro-batches than asked for (272 in 32 gives 31). The pieces are views of the batch: a caller
    that writes to it before the backward pass gets autograd's error, as from the plain module.
    """
    tensors, structure = flatten(value)
    aliased = aliased_values(tensors)
    pieces = [tensor.chunk(chunks) for tensor in tensors]
    microbatches = [MicroBatch(values, structure, aliased) for values in zip(*pieces, strict=True)]
    return microbatches, [piece.size(0) for piece in pieces[0]]


def gather(microbatches: Sequence[MicroBatch]) -> MicroBatch:
    """Concatenate results along dimension 0."""
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
    forms = [microbatch.structure for microbatch in microbatches]
    if any(form != forms[0] for form in forms):
        raise other_forms(forms)
    columns = list(zip(*(microbatch.values for microbatch in microbatches), strict=True))
    try:
        return MicroBatch(tuple(torch.cat(column) for column in columns), first.structure)
    except RuntimeError:
        for column in columns:
            check_shapes(column)
        raise


def check_shapes(tensors: Sequence[Tensor]) -> None:
    """Check tensors of all micro-batches that ``torch.cat`` has refused.

    Raises:
        ValueError: their shapes are the reason.
    """
    got = ", ".join(dict.fromkeys(str(list(tensor.shape)) for tensor in tensors))
    if any(tensor.is_nested for tensor in tensors):
        rule, got = "be tensors that torch.cat takes", f"nested ones of shapes {got}"
    elif len({tensor.shape[1:] for tensor in tensors}) > 1:
        rule = "agree in all dimensions but the first"
    else:
        return
    raise ValueError(
        f"results of all micro-batches must {rule}, got {got}; pad them in the last layer, or call pipe.step with a "
        "schedule, which computes the loss of each micro-batch by itself"
    )


def other_forms(forms: Sequence[Any]) -> TypeError:
    """The error of micro-batches that gave different tuples, lists or dicts; None is a tensor."""
    names = list(dict.fromkeys("a tensor" if form is None else " ".join(str(form).split()) for form in forms))
    return TypeError(
        f"results of all micro-batches must have one form, got {names}; return the same tuple from every one"
    )
