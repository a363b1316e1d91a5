"""One row of the published benchmarks, run in the simulator as torchgpipe's scripts ran it.

- A speed is that of an epoch: its whole mini-batches back to back, and the smaller one at its end, if there is one.
- A memory is the sum over devices of the peak reserved bytes in two steps; activations are this sum without 12 bytes
  for each parameter: the parameter, its gradient and RMSprop's average.
- Where host threads race, in the ablation's baseline, there are more steps, as there were: the mean of their times, the
  most of their memory.
- A utilisation is what sampling the driver shows: the share of a step in which a device computes, or sends a copy.
- torchgpipe exempts micro-batch number ``chunks - 1`` from checkpointing; where a batch gives fewer, none is exempt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.errors import OutOfMemory
from gpipe_bench.simulator.clock.run import Run, Settings, run
from gpipe_bench.simulator.clock.settings import enough_steps
from gpipe_bench.simulator.clock.simulation import GIB, gib_texts, step_uses
from gpipe_bench.simulator.hardware.profile import HardwareMachine, Profile, load_profile
from gpipe_bench.simulator.published.settings import Setting, published_cells
from gpipe_bench.simulator.workloads.workload import Workload

if TYPE_CHECKING:
    from gpipe_bench.simulator.workloads.sources import ModelSource

_THROUGHPUT: Final = "throughput_samples_per_s"
_UTILIZATION: Final = "utilization_fraction"
_RESERVED: Final = "peak_reserved_gib"
_ACTIVATIONS: Final = "activation_memory_gib"
_MODEL: Final = "model_memory_gib"

METRICS: Final = (_THROUGHPUT, _UTILIZATION, _RESERVED, _MODEL, _ACTIVATIONS)
"""What is predicted: throughput, utilisation and memory; not what follows from them, as speed-ups do."""

_PER_GRADIENT: Final = 3
"""A parameter, its gradient and RMSprop's average."""


@dataclass(frozen=True, slots=True)
class SimulatedValues:
    """What the simulation says of a row.

    Attributes:
        values: metric -> value in the metric's unit; a metric is missing when memory ran out.
        reason: how memory ran out; empty when it did not.
    """

    values: dict[str, float]
    reason: str = ""


def is_fitted(row: Setting) -> bool:
    """Whether constants were fitted to the throughput of a row: one device, or AmoebaNet-D n2m1."""
    return bool(row.full_steps) and (
        row.partitions == 1 or (row.table, row.experiment) == ("amoebanet-d-speed", "n2m1")
    )


def is_held_out(row: Setting) -> bool:
    """Whether a row was kept apart from all development until it was predicted: ResNet-101 on several devices."""
    return row.table == "resnet101-speed" and row.partitions > 1


def published_source(row: Setting, cache: Path | None = None) -> ModelSource:
    """Traces of a row's model; ``cache``: folder of stored traces."""
    # Traces are needed only for a workload that is not stored.
    from gpipe_bench.simulator.workloads.sources import model_of_suite, resnet101_source

    if row.model == "resnet101":
        return resnet101_source(cache)
    return model_of_suite(row.model, row.model_arguments(), cache)


class PublishedRuns:
    """Runs published rows; those that differ in components only share their work.

    Args:
        profile: the devices, or the name of a profile of the package.
        cache: folder of stored traces; the user's cache folder by default.
    """

    def __init__(self, profile: Profile | str, cache: Path | None = None) -> None:
        self.profile = load_profile(profile) if isinstance(profile, str) else profile
        self.machine = HardwareMachine(self.profile)
        self._cache = cache
        # The last one: rows that share a workload follow each other.
        self._last: tuple[object, Workload] | None = None

    def outcome(self, row: Setting) -> SimulatedValues:
        """Simulate a row, for the metrics that were published."""
        metrics = [metric for metric in published_cells(row) if metric in METRICS]
        values: dict[str, float] = {}
        if _MODEL in metrics:
            values[_MODEL] = self._model_bytes(row) / GIB
        try:
            done = self.run_of(row, row.batch_size, memory=bool({_RESERVED, _ACTIVATIONS} & {*metrics}))
            find: dict[str, Callable[[], float]] = {
                _THROUGHPUT: lambda: self.throughput(row, done),
                _UTILIZATION: lambda: _utilization(row, done),
                _RESERVED: lambda: sum(done.peak_reserved_bytes) / GIB,
                _ACTIVATIONS: lambda: (sum(done.peak_reserved_bytes) - self._model_bytes(row)) / GIB,
            }
            return SimulatedValues(values | {metric: find[metric]() for metric in metrics if metric in find})
        except OutOfMemory as error:
            asked, capacity = gib_texts((error.reserved + error.needed) / GIB, error.capacity / GIB, 2)
            return SimulatedValues(values, f"out of memory: device {error.device} asks for {asked} and has {capacity}")

    def throughput(self, row: Setting, whole: Run) -> float:
        """Samples of an epoch over its time; ``whole``: a run of its whole mini-batches."""
        samples, time_ns = row.full_steps * row.batch_size, row.full_steps * whole.step_ns
        if row.rest_batch_size:
            samples += row.rest_batch_size
            time_ns += self.step_ns(row, row.rest_batch_size)
        return samples / time_ns * 1e9

    def step_ns(self, row: Setting, batch_size: int) -> int:
        """Time of a step among others, with another number of samples than the row's, and enough memory."""
        return self.run_of(row, batch_size, memory=False).step_ns

    def run_of(self, row: Setting, batch_size: int, *, memory: bool) -> Run:
        """Steps of a row, with any number of samples: as many as show what a step takes.

        Raises:
            OutOfMemory: with ``memory``, a device is too small.
        """
        work = self._workload(row, batch_size)
        exempt = row.checkpoint == "except_last" and work.m == row.chunks
        checkpoint = row.checkpoint if exempt or row.checkpoint != "except_last" else "always"
        settings = Settings(_components(row), checkpoint, "published", memory=memory)
        return run(work, self.machine, replace(settings, steps=enough_steps(settings, work.m * work.n)))

    def _workload(self, row: Setting, batch_size: int) -> Workload:
        """The work of a row."""
        key = row.model, row.model_args, row.balance, batch_size, row.chunks, row.partitions, row.optimizer
        if self._last is None or self._last[0] != key:
            self._last = key, self._composed(row, batch_size)
        return self._last[1]

    def _composed(self, row: Setting, batch_size: int) -> Workload:
        from gpipe_bench.simulator.workloads.build import workload_of

        source = published_source(row, self._cache)
        # Without a pipeline there is one partition of all layers.
        balance = row.balance if row.chunks > 1 or row.partitions > 1 else (len(source.facts),)
        return workload_of(
            source,
            balance=balance,
            batch_size=batch_size,
            chunks=row.chunks,
            profile=self.profile,
            optimizer=row.optimizer,
            cache=self._cache,
        )

    def _model_bytes(self, row: Setting) -> int:
        work = self._workload(row, row.batch_size)
        return _PER_GRADIENT * sum(part.gradients for part in work.static)


def _components(row: Setting) -> Components:
    """Only the ablation switches any off."""
    return Components.from_label(row.experiment) if row.table == "ablation" else Components.from_label(PUBLISHED[-1])


def _utilization(row: Setting, done: Run) -> float:
    uses = step_uses(done, range(row.partitions), len(done.step_ends_ns) - 1)
    return sum(use.utilization_fraction for use in uses) / row.partitions
