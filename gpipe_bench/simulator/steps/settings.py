"""How a workload is run: components, devices, and the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gpipe_bench.components import Components
from gpipe_bench.schedules import Schedule, named_schedule
from gpipe_bench.schedules.table import placement

# Where threads race: an epoch of the published ablation twice over, after a first step; of large runs fewer steps.
_RACING_STEPS: Final = 33
_RACING_TASKS: Final = 33 * 32


@dataclass(frozen=True, slots=True)
class Settings:
    """How the engine runs a workload.

    Attributes:
        components: which components are on.
        checkpoint: ``always``, ``except_last`` or ``never``.
        schedule: the name of one of :mod:`gpipe_bench.schedules`, or a schedule, which then orders everything as
            ``pipe.step`` runs it, with a loss for each micro-batch; None: the forward program, and then autograd.
        flavour: which autograd engine, see :mod:`gpipe_bench.simulator.steps.lanes`.
        transfer: ``direct`` or ``host``.
        devices: device of each partition; empty: one each.
        streams: whether devices have streams; the CPU has none.
        workers: whether workers issue the tasks of a clock-cycle; else the calling thread does.
        nesting_ns: of a nested backward pass in flavour ``published``, the host's time to prepare it and the mean
            latency of its root; how many checkpoints nest before the first comes back is a race of the two.
        seed: of the latencies, see :mod:`gpipe_bench.simulator.steps.trace`; None: all are their mean.
        memory: whether to follow the allocators.
        steps: training steps, back to back: the host does not wait for the devices between them.
    """

    components: Components = field(default_factory=Components)
    checkpoint: str = "except_last"
    flavour: str = "current"
    transfer: str = "direct"
    devices: tuple[int, ...] = ()
    streams: bool = True
    workers: bool = True
    nesting_ns: tuple[int, int] = (50_000, 100_000)
    seed: int | None = 0
    memory: bool = True
    steps: int = 1
    schedule: str | Schedule | None = None

    @property
    def races(self) -> bool:
        """Whether host threads race, so that no two steps are alike: checkpoints nest, and nothing orders them."""
        nests = self.flavour == "published" and self.schedule is None and self.checkpoint != "never"
        return nests and not self.components.fork_join


def enough_steps(settings: Settings, tasks: int) -> int:
    """Steps that show what a step takes: a first one and another, or many where threads race.

    Args:
        settings: of the run.
        tasks: partitions times micro-batches.
    """
    return max(2, min(_RACING_STEPS, _RACING_TASKS // tasks)) if settings.races else 2


def chosen_schedule(schedule: str | Schedule, m: int, n: int, devices: Sequence[int]) -> Schedule:
    """A schedule by its name, or as it is.

    Args:
        schedule: either.
        m: micro-batches.
        n: partitions.
        devices: of each partition; empty: as the schedule has them. They say on how many devices a schedule of a loop
            is; on a single one, or where none is given, it has two partitions on each device.

    Raises:
        ScheduleError: there is no such schedule, or not for these numbers.
        ValueError: the schedule is for other numbers.
    """
    if isinstance(schedule, str):
        several = len(set(devices)) if len(set(devices)) > 1 else None
        schedule = named_schedule(schedule, m, n, max(placement(schedule, n, several)) + 1)
    elif (schedule.microbatches, schedule.partitions) != (m, n):
        got = f"{schedule.microbatches} micro-batches and {schedule.partitions} partitions"
        raise ValueError(f"schedule must be for {m} micro-batches and {n} partitions, got one for {got}; change it")
    return schedule


def check_devices(ranks: Sequence[int], devices: Sequence[int]) -> None:
    """Check that partitions which a schedule has on one device are on one.

    Args:
        ranks: for each partition its device of the schedule.
        devices: of each partition.

    Raises:
        ValueError: they are not.
    """
    first: dict[int, int] = {}
    for j, (rank, device) in enumerate(zip(ranks, devices, strict=True)):
        one = first.setdefault(rank, j)
        if devices[one] != device:
            rule = f"devices must be the same for partitions {one} and {j}, which the schedule has on one device"
            raise ValueError(f"{rule}, got {devices[one]} and {device}; use {[*ranks]}")
