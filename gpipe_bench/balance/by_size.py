"""Balance by size: bytes that each layer keeps for its backward pass, and bytes of its parameters.

The bytes are counted, not read from an allocator, so every device gives the same numbers. On the ``meta`` device this
takes no memory, so a model that is too large for any device can be balanced.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.autograd.dispatch_mode import DispatchMode, tensors_in
from gpipe_bench.balance.layers import sandbox, stages
from gpipe_bench.balance.partition import check_partitions, split_min_max
from gpipe_bench.balance.sample import Sample, check_model, device_of, first_microbatch
from gpipe_bench.settings import Chunks, checked


def balance_by_size(
    n: int,
    module: nn.Sequential,
    sample: Sample,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """Layers per partition such that the partition that takes most memory takes as little as it can.

    The result is the optimum for the sizes of :func:`layer_sizes`::

        balance = balance_by_size(2, module, x, chunks=8, param_scale=4, device="meta")

    Args:
        n: number of partitions.
        module: the model. Copies of its layers run; the model stays as it is, with its gradients and random state.
        sample: one mini-batch: a tensor of shape (batch size, ...), or a tuple. An ``nn.Sequential`` gets a tuple of
            tensors as one input, as in ``GPipe``. A ``PipeSequential``, and an ``nn.Sequential`` with a layer that
            requires several inputs, get a tuple as several inputs of any type, as in ``Pipe``; a tensor in a
            ``NoChunk`` is not split.
        chunks: number of micro-batches. The activations of the first micro-batch count.
        param_scale: how many times the bytes of a trainable parameter count: once for itself, once for its gradient,
            and for the state of the optimizer. Take 2-3 for SGD, 3-5 for RMSprop, 4-5 for Adam.
        device: device to run the layers on; default: that of ``sample``. On ``meta`` nothing is computed.

    Returns:
        n positive integers whose sum is the number of layers.

    Raises:
        BalanceError: a ValueError; ``n`` is less than 1 or more than the number of layers.
        SkipLayoutError: a TypeError; skips of ``module`` do not match.
        TypeError: ``module`` is not an ``nn.Sequential``, or ``sample`` is not what it takes.
        UnsupportedError: this machine does not have ``device``.
        ValueError: ``chunks`` is less than 1, ``param_scale`` is negative, a tensor of ``sample`` has no batch
            dimension, or its tensors give different numbers of micro-batches.
        Exception: a layer raised it; a note names the layer.
    """
    check_model(module, sample)
    check_partitions(n, len(module))
    sizes = layer_sizes(module, sample, chunks=chunks, param_scale=param_scale, device=device)
    return split_min_max(sizes, n)


def layer_sizes(
    module: nn.Sequential,
    sample: Sample,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | int | None = None,
) -> list[float]:
    """Bytes of each layer: activations of one micro-batch, parameters times ``param_scale``, and buffers.

    Activations are tensors that the layer makes and that still exist when the next layer has run: for the backward
    pass, as a stashed skip, or because the next layer passed them on. Frozen parameters and buffers count once.

    Arguments and errors are those of :func:`balance_by_size`.
    """
    check_model(module, sample)
    checked("chunks", Chunks, chunks)
    if not param_scale >= 0:
        raise ValueError(f"param_scale must not be negative, got {param_scale}; use 2 for SGD, 4 for Adam")
    where = device_of(sample, device)
    return _sizes(module, first_microbatch(module, sample, chunks), where, param_scale)


def _sizes(module: nn.Sequential, microbatch: Sample, device: torch.device, param_scale: float) -> list[float]:
    sizes: list[float] = []
    before: _Kept | None = None
    with sandbox(device):
        for stage in stages(module, microbatch, device):
            with _Births() as births:
                stage.forward()
            # Both layers have run: unless a graph keeps what passed between them, it is free from here on.
            stage.inputs = None
            if before is not None:
                before.output = None
                sizes.append(before.size())
            before = _Kept(births, _state_bytes(stage.layer, param_scale), stage.roots(), stage.output)
    return sizes if before is None else [*sizes, before.size()]


class _Kept:
    """What is left of a layer that has run: its graph and, until the next layer has run, its output."""

    def __init__(self, births: _Births, state_bytes: float, roots: list[Tensor], output: object) -> None:
        self._births = births
        self._state_bytes = state_bytes
        # A node of the graph keeps the graph alive, but not the tensor that it belongs to.
        self._graph = [root.grad_fn for root in roots]
        self.output = output

    def size(self) -> float:
        return self._births.alive_bytes() + self._state_bytes


def _state_bytes(layer: nn.Module, param_scale: float) -> float:
    parameters = sum(
        parameter.nbytes * (param_scale if parameter.requires_grad else 1) for parameter in layer.parameters()
    )
    return parameters + sum(buffer.nbytes for buffer in layer.buffers())


class _Births(DispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves the mode untyped
    """Sees every storage that operations under it allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._born: list[weakref.ref[torch.UntypedStorage]] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        # A view or a change in place gives the storage of an argument, which is not new.
        known = [*_storages(args), *_storages(kwargs)]
        for storage in _storages(result):
            if not any(storage is other for other in known):
                known.append(storage)
                self._born.append(weakref.ref(storage))
        return result

    def alive_bytes(self) -> int:
        """Bytes of the storages that something still holds."""
        return sum(storage.nbytes() for storage in (born() for born in self._born) if storage is not None)


def _storages(value: object) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors_in(value) if tensor.layout is torch.strided]
