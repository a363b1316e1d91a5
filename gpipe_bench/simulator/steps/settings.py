"""How a workload is run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from gpipe_bench.components import Components
from gpipe_bench.schedules import Schedule

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
        seed: of the latencies, see :mod:`gpipe_bench.simulator.steps.latency`; None: all are their mean.
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
