"""One training run to measure: the pipeline of a cell, its batch, and the step that is repeated.

Batch, optimizer and loss are those of torchgpipe's speed and ablation benchmarks: one made-up batch that stays on its
devices, SGD with learning rate 0.1 without momentum or weight decay, nothing read back to the host inside a step.
The optimizer is written out, as the loop that PyTorch 1.3 ran for them: ``torch.optim`` loads the compiler of PyTorch,
which takes longer than the rest of a small run.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench import __version__
from gpipe_bench.balance.by_time import layer_times
from gpipe_bench.balance.partition import split_min_max
from gpipe_bench.distributed import Pipe
from gpipe_bench.engine.gpipe import GPipe
from gpipe_bench.errors import ConfigError, DeviceCountError
from gpipe_bench.models.table import MODELS, model_digest, parse_arguments
from gpipe_bench.suite.cells import MeasuredCell
from gpipe_bench.suite.running.ranks import Ranks
from gpipe_bench.util.cache import cache_folder, read_sealed, write_sealed

_LEARNING_RATE = 0.1
_BALANCE_S = 2.0


class Trial:
    """The pipeline of ``cell`` on its devices, or the part of it that one of several processes has, ready to train.

    Weights and batch are drawn on the CPU, so they are the same on every device, and in every process.

    Raises:
        DeviceCountError: the machine has too few devices.
    """

    def __init__(self, cell: MeasuredCell, ranks: Ranks = Ranks()) -> None:  # noqa: B008 - it is a constant
        _check_devices(cell)
        spec = MODELS[cell.model]
        arguments = parse_arguments(cell.model, cell.model_args)
        torch.manual_seed(cell.seed)
        model = spec.build(**arguments)
        batch, target = spec.make_batch(cell.batch_size, arguments, torch.Generator().manual_seed(cell.seed))
        balance = list(cell.balance)
        if not balance:
            balance = ranks.gather(_timed_balance(cell, model, batch) if ranks.rank == 0 else [])[0]
        options: Any = {"balance": balance, "chunks": cell.chunks, "checkpoint": cell.checkpoint}
        options |= {"schedule": cell.schedule, "components": cell.components}
        self.pipe: GPipe | Pipe
        if ranks.size > 1:
            self.pipe = Pipe(model, device=cell.torch_devices()[ranks.rank], **options)
        else:
            options |= {"devices": cell.torch_devices(), "transfer": cell.transfer}
            self.pipe = GPipe(model, **options)
        self.devices = list(self.pipe.devices)
        self._batch, self._target = batch.to(self.devices[0]), target.to(self.devices[-1])
        self._loss = spec.loss
        self._whole = cell.backward == "autograd"
        self._parameters = list(self.pipe.parameters())

    def step(self) -> None:
        """Train on the batch once; on an accelerator the work is queued, not done, when this returns."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._whole:
            torch.autograd.backward(self._checked_loss(self.pipe(self._batch), self._target))
        else:
            self.pipe.step(self._batch, self._target, self._checked_loss, reduction="mean")
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-_LEARNING_RATE)

    def _checked_loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = self._loss(output, target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)[:60]
            raise ConfigError([f"loss must give one number in a tensor, got {got}; take its mean or sum"])
        return loss


def prepare_process(cell: MeasuredCell) -> None:
    """Set all that PyTorch keeps per process, so that a result depends on the cell and not on the environment."""
    torch.set_num_threads(cell.threads)
    torch.backends.cudnn.benchmark = False
    # By these names all kinds of operations agree, which torch.export asks for.
    torch.backends.cuda.matmul.allow_tf32 = cell.tf32
    torch.backends.cudnn.allow_tf32 = cell.tf32


def _check_devices(cell: MeasuredCell) -> None:
    if cell.device == "cpu":
        return
    found = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if found is not None and found.type == cell.device else 0
    if cell.devices > count * cell.hosts:
        raise DeviceCountError(
            f"devices must be at most the {count} {cell.device} devices that PyTorch sees here, got {cell.devices}; "
            "lower it, or choose another device"
        )


def _timed_balance(cell: MeasuredCell, model: nn.Sequential, batch: Tensor) -> list[int]:
    """Layers per partition such that the slowest partition is as fast as it can be on the first device of ``cell``.

    Cells of one model and micro-batch share the times by way of a file in the user's cache, so that they are cut alike.

    Args:
        cell: what is cut.
        model: its layers.
        batch: its inputs, whose first micro-batch is timed.

    Raises:
        BalanceError: more partitions than layers.
    """
    if cell.partitions == 1:
        return [len(model)]
    part, first = batch.chunk(cell.chunks)[0], torch.device(cell.torch_devices()[0])
    name = "cpu" if first.type == "cpu" else torch.get_device_module(first).get_device_name(first)
    asked = [str(model), model_digest(cell.model), part.shape, part.dtype, name, cell.threads, cell.tf32]
    key = hashlib.sha256(repr([*asked, torch.__version__, __version__]).encode()).hexdigest()[:32]
    path = cache_folder("balance") / f"{key}.json"
    stored = read_sealed(path)
    if stored is None:
        times = layer_times(model, part, timeout=_BALANCE_S, device=first)
        with suppress(OSError):
            write_sealed(path, json.dumps(times).encode())
    else:
        times = json.loads(stored)
    return split_min_max(times, cell.partitions)
