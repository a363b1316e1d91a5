"""Balance by time: forward and backward passes of the layers, timed on the device that will run them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from gpipe_bench.balance.layers import Stage, sandbox, stages
from gpipe_bench.balance.partition import check_partitions, split_min_max
from gpipe_bench.balance.sample import Sample, check_model, device_of, whole_batch

_RUNS_PER_VISIT: Final = 3


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
    check_model(module, sample)
    where = device_of(sample, device)
    if where.type == "meta":
        raise ValueError("device must be one that computes, got meta; name the device that will run the model")
    if not (math.isfinite(timeout) and timeout >= 0):
        raise ValueError(f"timeout must be a finite number of seconds, at least 0, got {timeout}; use 1.0")
    return _medians(module, whole_batch(sample), timeout, where)


def _medians(module: nn.Sequential, batch: Sample, timeout: float, device: torch.device) -> list[float]:
    samples: list[list[float]] = [[] for _ in module]
    deadline = time.perf_counter() + timeout
    with sandbox(device):
        while not all(samples) or time.perf_counter() < deadline:
            _round(stages(module, batch, device), samples, device, deadline)
    return [max(0.0, statistics.median(taken)) for taken in samples]


def _round(walk: Iterator[Stage], samples: list[list[float]], device: torch.device, deadline: float) -> None:
    """Visit every layer; after the deadline, only layers that were never timed."""
    for stage, taken in zip(walk, samples, strict=True):
        if taken and time.perf_counter() >= deadline:
            return
        _seconds(stage, device)
        idle = stage.idle()
        _seconds(idle, device)
        for _ in range(_RUNS_PER_VISIT):
            taken.append(_seconds(stage, device) - _seconds(idle, device))
            if time.perf_counter() >= deadline:
                break


def _seconds(stage: Stage, device: torch.device) -> float:
    """Time of one forward and one backward pass, without the time that it takes to make the first gradients."""
    start = _clock(device)
    stage.forward()
    forward = _clock(device) - start
    gradients = [torch.ones_like(root) for root in stage.roots()]
    if not gradients:
        return forward
    start = _clock(device)
    stage.backward(gradients)
    return forward + _clock(device) - start


def _clock(device: torch.device) -> float:
    """Seconds, read when the device has finished all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
