"""Balance by time: forward and backward passes of the layers, timed on the device that will run them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpipe_bench.autograd.dispatch_mode import tensors_in
from gpipe_bench.balance.by_size import layer_sizes
from gpipe_bench.balance.layers import Stage, sandbox, stages
from gpipe_bench.balance.partition import check_partitions, split_min_max
from gpipe_bench.balance.sample import Sample, check_model, device_of, whole_batch
from gpipe_bench.errors import UnsupportedError
from gpipe_bench.simulator import MeasuredLayer

_RUNS_PER_VISIT: Final = 3
_MIB: Final = 2**20

_Backward = Callable[[Stage, Sequence[Tensor]], None]
_Times = tuple[float, ...]


def balance_by_time(
    n: int,
    module: nn.Sequential,
    sample: Sample,
    *,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """Layers per partition such that the slowest partition is as fast as it can be.

    The result is the optimum for the times of :func:`layer_times`::

        balance = balance_by_time(2, module, x)
        pipe = GPipe(module, balance, devices=["cuda:0", "cuda:1"], chunks=8)

    Args:
        n: number of partitions.
        module: the model. Copies of its layers run; the model stays as it is, with its gradients and random state.
        sample: one micro-batch of the shapes that training will use: a tensor, or a tuple. An ``nn.Sequential`` gets
            a tuple of tensors as one input, as in ``GPipe``. A ``PipeSequential``, and an ``nn.Sequential`` with a
            layer that requires several inputs, get a tuple as several inputs of any type, as in ``Pipe``.
        timeout: seconds to spend. Every layer is timed at least once, so a small timeout may be exceeded.
        device: device to time on; default: that of ``sample``.

    Returns:
        n positive integers whose sum is the number of layers.

    Raises:
        BalanceError: a ValueError; ``n`` is less than 1 or more than the number of layers.
        SkipLayoutError: a TypeError; skips of ``module`` do not match.
        TypeError: ``module`` is not an ``nn.Sequential``, or ``sample`` is not what it takes.
        UnsupportedError: this machine does not have ``device``.
        ValueError: ``timeout`` is negative or not finite, or ``device`` is ``meta``.
        Exception: a layer raised it; a note names the layer.
    """
    check_model(module, sample)
    check_partitions(n, len(module))
    return split_min_max(layer_times(module, sample, timeout=timeout, device=device), n)


def layer_times(
    module: nn.Sequential,
    sample: Sample,
    *,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
) -> list[float]:
    """Seconds of one forward and one backward pass of each layer: medians of several runs.

    The layers are visited in turn, round by round until the time is up, so other work of the machine falls on all of
    them. The first run of each visit warms up libraries and memory and does not count. A layer that does nothing, in
    the place of the layer, takes the time that the profiler itself needs. That time is subtracted, so a layer that
    only passes its input on costs about 0.

    Arguments and errors are those of :func:`balance_by_time`.
    """
    runs = _runs(module, sample, timeout, device, (Stage.backward,))
    return [_median(map(sum, taken)) for taken in runs]


def measure_layers(
    module: nn.Sequential,
    sample: Sample,
    *,
    timeout: float = 10.0,
    device: torch.device | str | int | None = None,
) -> list[MeasuredLayer]:
    """Time and size of each layer for one micro-batch, as :func:`gpipe_bench.simulator.simulate` takes them.

    The gradients of the weights take what a backward pass for the inputs alone does not::

        layers = measure_layers(module, x, device="cuda")
        write_layers("times.csv", layers)
        simulate(layers, balance=[3, 3], batch_size=8 * len(x), chunks=8, schedule="zb_h1", profile="h100")

    Arguments and errors are those of :func:`balance_by_time`; a layer with skips is an UnsupportedError.
    """
    check_model(module, sample)
    where = device_of(sample, device)
    kept = layer_sizes(module, sample, param_scale=0, device=where)
    layers: list[MeasuredLayer] = []
    with sandbox(where):
        for stage, nbytes in zip(stages(module, whole_batch(sample), where), kept, strict=True):
            stage.forward()
            if stage.stashed or stage.read:
                rule = "module must have layers without skips to be measured one by one"
                raise UnsupportedError(f"{rule}, got one in layer {len(layers)}; simulate the module itself")
            parameters = [*stage.layer.parameters()]
            learning = [parameter.nbytes for parameter in parameters if parameter.requires_grad]
            others = sum(tensor.nbytes for tensor in (*parameters, *stage.layer.buffers())) - sum(learning)
            layers.append(
                MeasuredLayer(
                    name=type(stage.layer).__name__, samples=len(next(tensors_in(sample))),
                    forward_ms=0, backward_ms=0, backward_weights_ms=0,
                    activation_mib=(nbytes - others) / _MIB,
                    output_mib=sum(tensor.nbytes for tensor in tensors_in(stage.output)) / _MIB,
                    parameter_mib=sum(learning) / _MIB, parameters=len(learning), buffer_mib=others / _MIB,
                )
            )  # fmt: skip
    runs = _runs(module, sample, timeout, device, (Stage.backward, Stage.backward_inputs))
    return [_timed(layer, taken) for layer, taken in zip(layers, runs, strict=True)]


def _timed(layer: MeasuredLayer, runs: Sequence[_Times]) -> MeasuredLayer:
    forward, backward, _, inputs = (1000 * _median(column) for column in zip(*runs, strict=True))
    weights = max(0.0, backward - inputs) if layer.parameter_mib else 0.0
    times = {"forward_ms": forward, "backward_ms": backward, "backward_weights_ms": weights}
    rounded: dict[str, Any] = {name: round(ms, 6) for name, ms in times.items()}
    return replace(layer, **rounded)


def _median(seconds: Iterable[float]) -> float:
    return max(0.0, statistics.median(seconds))


def _runs(
    module: nn.Sequential,
    sample: Sample,
    timeout: float,
    device: torch.device | str | int | None,
    passes: Sequence[_Backward],
) -> list[list[_Times]]:
    """For each layer its runs: for each of some backward passes the time of a forward pass before it, and its own."""
    check_model(module, sample)
    where = device_of(sample, device)
    if where.type == "meta":
        raise ValueError("device must be one that computes, got meta; name the device that will run the model")
    if not (math.isfinite(timeout) and timeout >= 0):
        raise ValueError(f"timeout must be a finite number of seconds, at least 0, got {timeout}; use 1.0")
    batch = whole_batch(sample)
    runs: list[list[_Times]] = [[] for _ in module]
    deadline = time.perf_counter() + timeout
    with sandbox(where):
        while not all(runs) or time.perf_counter() < deadline:
            _round(stages(module, batch, where), runs, where, deadline, passes)
    return runs


def _round(
    walk: Iterator[Stage],
    runs: list[list[_Times]],
    device: torch.device,
    deadline: float,
    passes: Sequence[_Backward],
) -> None:
    """Visit every layer; after the deadline, only layers that were never timed."""
    for stage, taken in zip(walk, runs, strict=True):
        if taken and time.perf_counter() >= deadline:
            return
        _seconds(stage, device, passes)
        idle = stage.idle()
        _seconds(idle, device, passes)
        for _ in range(_RUNS_PER_VISIT):
            both = _seconds(stage, device, passes), _seconds(idle, device, passes)
            taken.append(tuple(own - other for own, other in zip(*both, strict=True)))
            if time.perf_counter() >= deadline:
                break


def _seconds(stage: Stage, device: torch.device, passes: Sequence[_Backward]) -> _Times:
    """Times of a forward pass and each backward pass, without the time that it takes to make the first gradients."""
    times: list[float] = []
    for run in passes:
        start = _clock(device)
        stage.forward()
        forward = _clock(device) - start
        gradients = [torch.ones_like(root) for root in stage.roots()]
        start = _clock(device)
        if gradients:
            run(stage, gradients)
        times += [forward, _clock(device) - start if gradients else 0.0]
    return tuple(times)


def _clock(device: torch.device) -> float:
    """Seconds, read when the device has finished all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
