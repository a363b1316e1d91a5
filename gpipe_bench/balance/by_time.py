"""Balance by time: the layers' forward and backward passes, timed on the device that will run them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import nn

from gpipe_bench.balance.kept import device_name, kept_costs
from gpipe_bench.balance.layers import Stage, sandbox, stages
from gpipe_bench.balance.partition import check_partitions, split_min_max
from gpipe_bench.balance.sample import Sample, check_model, device_of, whole_batch

__all__ = ["balance_by_time", "layer_times"]

_RUNS_PER_VISIT: Final = 3


def balance_by_time(
    n: int,
    module: nn.Sequential,
    sample: Sample,
    *,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
    cache: str | Path | None = None,
) -> list[int]:
    """Layers per partition such that the slowest partition is as fast as it can be.

    The result is optimal for the times that were measured; see :func:`layer_times`.

    Args:
        n: partitions.
        module: the model; it is left as it was.
        sample: one micro-batch, a Tensor or a tuple of Tensors of the shapes that training will use.
        timeout: seconds to spend; every layer is timed at least once, however short it is.
        device: where to time; by default where ``sample`` is.
        cache: folder in which times are kept, see :mod:`gpipe_bench.balance.kept`; by default they are not.

    Returns:
        n positive numbers that sum to the number of layers.

    Raises:
        BalanceError: a ValueError; n is not positive or exceeds the layers.
        TypeError: ``module`` or ``sample`` is of another type.
        ValueError: ``timeout`` or ``device``.
    """
    check_model(module, sample)
    check_partitions(n, len(module))
    return split_min_max(layer_times(module, sample, timeout=timeout, device=device, cache=cache), n)


def layer_times(
    module: nn.Sequential,
    sample: Sample,
    *,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
    cache: str | Path | None = None,
) -> list[float]:
    """Median seconds of one forward and one backward pass of each layer.

    Arguments and errors are those of :func:`balance_by_time`. The layers are visited in turn, round by round until the
    time is up, so that what else the machine does meanwhile falls on all of them. The first run of a visit is not
    counted: libraries and memory warm up in it.
    """
    check_model(module, sample)
    where = device_of(sample, device)
    if where.type == "meta":
        raise ValueError("device must be one that computes, got meta; name the device that will run the model")
    if not (math.isfinite(timeout) and timeout >= 0):
        raise ValueError(f"timeout must be a finite number of seconds, at least 0, got {timeout}; use 1.0")
    question = {"cost": "time", "device": device_name(where), "timeout": timeout}
    batch = whole_batch(sample)
    return kept_costs(cache, module, batch, question, lambda: _medians(module, batch, timeout, where))


def _medians(module: nn.Sequential, batch: Sample, timeout: float, device: torch.device) -> list[float]:
    samples: list[list[float]] = [[] for _ in module]
    deadline = time.perf_counter() + timeout
    with sandbox(device):
        while not all(samples) or time.perf_counter() < deadline:
            _round(stages(module, batch, device), samples, device, deadline)
    return [max(0.0, statistics.median(taken)) for taken in samples]


def _round(walk: Iterator[Stage], samples: list[list[float]], device: torch.device, deadline: float) -> None:
    """Visit every layer; after the deadline only those that were never timed."""
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
    """Time of one forward and one backward pass; the gradients that start the latter are made in between, untimed."""
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
    """Seconds, after everything that the device was given has run."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
