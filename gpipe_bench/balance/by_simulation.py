"""Balance by simulation: the time that each layer takes on hardware that the simulator has a profile of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from gpipe_bench.balance.partition import check_partitions, split_min_max
from gpipe_bench.balance.sample import Sample, check_model, check_one_input
from gpipe_bench.machine.profile import HardwareMachine, Profile, load_profile
from gpipe_bench.schedules.cycles import checkpoint_stop
from gpipe_bench.settings import Checkpoint, checked
from gpipe_bench.simulator.workloads.build import layers_of, source_of, workload_of
from gpipe_bench.simulator.workloads.sources import ModelSource
from gpipe_bench.step.request import AnyModel, Model, Precision


def balance_by_simulation(
    n: int,
    module: AnyModel,
    sample: Sample | None = None,
    *,
    profile: str | Path | Profile = "p40",
    batch_size: int | None = None,
    chunks: int = 1,
    checkpoint: str = "except_last",
    precision: str = "float32",
    cache: str | Path | None = None,
) -> list[int]:
    """Layers per partition such that the busiest device is as little busy as it can be, on simulated hardware.

    The result is the optimum for the times of :func:`layer_simulated_times`::

        balance = balance_by_simulation(4, module, x, profile="h100", chunks=8)

    Args:
        n: number of partitions.
        module: an ``nn.Sequential`` on any device, on ``meta`` without memory, which stays as it is; or a model of the
            suite, a :class:`gpipe_bench.simulator.Model`; or a list of :class:`gpipe_bench.simulator.MeasuredLayer`.
        sample: with an ``nn.Sequential``, one mini-batch on any device: a tensor of shape (batch size, ...), or a tuple
            of such tensors, which the first layer gets as one input.
        profile: name of a hardware profile, path of a YAML file, or a profile.
        batch_size: samples of a mini-batch; default: those of ``sample``. Without a sample it is needed.
        chunks: number of micro-batches.
        checkpoint: ``always``, ``except_last`` or ``never``; recomputation counts.
        precision: ``float32``, or a half, ``float16`` or ``bfloat16``, as of :func:`gpipe_bench.simulator.simulate`.
        cache: folder that stores traces of a model of the suite; default: the user's cache folder.

    Returns:
        n positive integers whose sum is the number of layers.

    Raises:
        BalanceError: a ValueError; ``n`` is less than 1 or more than the number of layers.
        ConfigError: there is no such profile or model.
        SkipLayoutError: a TypeError; skips of ``module`` do not match.
        TraceError: a layer does not run on tensors without values.
        TypeError: ``module`` is of another type, a layer requires several inputs, or ``sample`` does not consist of
            tensors.
        ValueError: ``batch_size``, ``chunks``, ``checkpoint`` or ``precision`` is wrong.
    """
    how: dict[str, Any] = {"chunks": chunks, "checkpoint": checkpoint, "precision": precision, "cache": cache}
    times = layer_simulated_times(module, sample, profile=profile, batch_size=batch_size, **how)
    check_partitions(n, len(times))
    return split_min_max(times, n)


def layer_simulated_times(
    module: AnyModel,
    sample: Sample | None = None,
    *,
    profile: str | Path | Profile = "p40",
    batch_size: int | None = None,
    chunks: int = 1,
    checkpoint: str = "except_last",
    precision: str = "float32",
    cache: str | Path | None = None,
) -> list[float]:
    """Seconds per training step for which each layer keeps its device busy: all micro-batches, forward and backward.

    If the host takes longer to launch the kernels of a pass than the device takes to run them, the time of the host
    counts. Transfers, the loss and the optimizer do not count.

    Arguments and errors are those of :func:`balance_by_simulation`.
    """
    checked("checkpoint", Checkpoint, checkpoint)
    checked("precision", Precision, precision)
    hardware = profile if isinstance(profile, Profile) else load_profile(profile)
    how: dict[str, Any] = {"precision": precision, "cache": Path(cache) if cache else None}
    if isinstance(module, Model) or layers_of(module):
        if sample is not None or batch_size is None:
            raise ValueError("a model of the suite and measured layers must come with batch_size and no sample")
        return _times(source_of(module, **how), hardware, batch_size, chunks, checkpoint)
    check_model(module, sample)
    given: Sample = sample  # type: ignore[assignment]  # as checked
    network: nn.Sequential = module  # type: ignore[assignment]  # likewise
    check_one_input(network, sample)
    size = len(given[0] if isinstance(given, tuple) else given) if batch_size is None else batch_size
    return _times(source_of(network, sample=given, **how), hardware, size, chunks, checkpoint)


def _times(source: ModelSource, profile: Profile, batch_size: int, chunks: int, checkpoint: str) -> list[float]:
    layers = [1] * len(source.facts)
    work = workload_of(source, balance=layers, batch_size=batch_size, chunks=chunks, profile=profile, optimizer=None)
    launch_ns = HardwareMachine(profile).launch_ns
    stop = checkpoint_stop(checkpoint, work.m)

    def spent_ns(j: int) -> int:
        spent = 0
        for i in range(work.m):
            task = work.task(i, j)
            passes = [task.forward]
            if task.learns:
                passes += [task.backward, *([task.recompute] if i < stop else [])]
            spent += sum(max(kernels.duration_ns, kernels.launches * launch_ns) for kernels in passes)
        return spent

    return [spent_ns(j) / 1e9 for j in range(work.n)]
