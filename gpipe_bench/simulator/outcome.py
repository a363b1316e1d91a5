"""How a workload is run, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpipe_bench.components import Components
from gpipe_bench.schedule import CHECKPOINT_MODES
from gpipe_bench.simulator.autograd import FLAVOURS
from gpipe_bench.simulator.host import Issued
from gpipe_bench.timeline import TimelineEvent

if TYPE_CHECKING:
    from gpipe_bench.simulator.grid import Grid

__all__ = ["BACKWARDS", "MECHANISMS", "Run", "Settings", "enough_steps"]

MECHANISMS: Final = frozenset({"barrier", "rank", "zeros"})
"""What :attr:`Settings.left_out` may name."""

BACKWARDS: Final = ("autograd", "scheduled")
"""What may drive the backward pass."""

_TRANSFERS = ("direct", "host")
# Where threads race: an epoch of the published ablation twice over, after a first step; of large runs fewer steps.
_RACING_STEPS: Final = 33
_RACING_TASKS: Final = 33 * 32


@dataclass(frozen=True, slots=True)
class Settings:
    """How the engine runs a workload.

    Attributes:
        components: which components are on.
        checkpoint: ``always``, ``except_last`` or ``never``.
        backward: ``autograd``, or ``scheduled``: workers run the reversed schedule.
        flavour: which autograd engine, see :mod:`gpipe_bench.simulator.autograd`.
        transfer: ``direct`` or ``host``.
        devices: device of each partition; empty: one each.
        streams: whether devices have streams; the CPU has none.
        nesting_ns: of a nested backward pass in flavour ``published``, the host's time to prepare it and the mean
            latency of its root; how many checkpoints nest before the first comes back is a race of the two.
        seed: of the latencies, see :mod:`gpipe_bench.simulator.latency`; None: all are their mean.
        left_out: mechanisms to go without, to see what they are worth: ``barrier``, a copy waits for its sender alone;
            ``rank``, ready nodes run in the order of their arrival; ``zeros``, a gradient that is None stays so, and
            recomputations run on the thread of the CPU.
        marks: whether an observer marks backward passes without checkpoint.
        memory: whether to follow the allocators.
        tally: with ``memory``, only count the bytes of tensors: no allocator, no limit.
        steps: training steps, back to back: the host does not wait for the devices between them.
    """

    components: Components = field(default_factory=Components)
    checkpoint: str = "except_last"
    flavour: str = "current"
    transfer: str = "direct"
    devices: tuple[int, ...] = ()
    streams: bool = True
    nesting_ns: tuple[int, int] = (50_000, 100_000)
    seed: int | None = 0
    left_out: frozenset[str] = frozenset()
    marks: bool = False
    memory: bool = True
    tally: bool = False
    steps: int = 1
    backward: str = "autograd"

    def __post_init__(self) -> None:
        choices = {
            "checkpoint": CHECKPOINT_MODES,
            "flavour": FLAVOURS,
            "transfer": _TRANSFERS,
            "backward": BACKWARDS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                got = getattr(self, name)
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {got!r}; choose one of them")
        unknown = sorted(self.left_out - MECHANISMS)
        if unknown:
            raise ValueError(f"left_out must be of {', '.join(sorted(MECHANISMS))}, got {unknown}; correct it")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}; simulate one step or more")

    @property
    def races(self) -> bool:
        """Whether host threads race, so that no two steps are alike: checkpoints nest, and nothing orders them."""
        nests = self.flavour == "published" and self.backward == "autograd" and self.checkpoint != "never"
        return nests and not self.components.fork_join


def enough_steps(settings: Settings, tasks: int) -> int:
    """Steps that show what a step takes: a first one and another, or many where threads race.

    Args:
        settings: of the run.
        tasks: partitions times micro-batches.
    """
    return max(2, min(_RACING_STEPS, _RACING_TASKS // tasks)) if settings.races else 2


@dataclass(frozen=True, slots=True)
class Run:
    """What a simulation gives.

    Attributes:
        makespan_ns: when the last operation ended.
        step_ends_ns: when the last operation of each step ended.
        issued: every task, in the order in which host threads issued it.
        peak_live_bytes: per device, of all tensors; empty without memory.
        peak_allocated_bytes: the same, rounded as the allocator rounds.
        peak_reserved_bytes: of segments.
        flushes: per device, how often its allocator gave cached segments back.
        grid: in place of ``issued``, all times of a run so large that they came as arrays.
        extrapolated: names of the fields that were extrapolated from smaller runs: peaks of such a run.
    """

    makespan_ns: int
    step_ends_ns: tuple[int, ...]
    issued: tuple[Issued, ...]
    peak_live_bytes: tuple[int, ...]
    peak_allocated_bytes: tuple[int, ...]
    peak_reserved_bytes: tuple[int, ...]
    flushes: tuple[int, ...]
    grid: Grid | None = None
    extrapolated: tuple[str, ...] = ()

    @property
    def step_ns(self) -> int:
        """The mean time of the steps after the first; of a single one until its devices are idle."""
        ends = self.step_ends_ns
        return round((ends[-1] - ends[0]) / (len(ends) - 1)) if len(ends) > 1 else self.makespan_ns

    def events(self, device: str = "cuda", zero_us: float = 0.0) -> list[TimelineEvent]:
        """The timeline, in the order of starts.

        Args:
            device: type of device in the names of devices.
            zero_us: start of the events' clock.
        """
        return [
            TimelineEvent(
                f"{device}:{task.device}", task.stream, task.kind, task.i, task.j, task.issue_ns / 1e3 - zero_us,
                task.first.start / 1e3 - zero_us, task.last.end / 1e3 - zero_us, task.nbytes,
            )
            for task in sorted(self.issued, key=lambda task: (task.first.start, task.last.end, task.j))
        ]  # fmt: skip
