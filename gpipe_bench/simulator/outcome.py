"""How a workload is run, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpipe_bench.components import Components
from gpipe_bench.schedule import CHECKPOINT_MODES
from gpipe_bench.simulator.autograd import FLAVOURS
from gpipe_bench.simulator.grid import Grid
from gpipe_bench.simulator.host import Issued
from gpipe_bench.timeline import TimelineEvent

__all__ = ["Run", "Settings"]

_TRANSFERS = ("direct", "host")


@dataclass(frozen=True, slots=True)
class Settings:
    """How the engine runs a workload.

    Attributes:
        components: which components are on.
        checkpoint: ``always``, ``except_last`` or ``never``.
        flavour: which autograd engine, see :mod:`gpipe_bench.simulator.autograd`.
        transfer: ``direct`` or ``host``.
        devices: device of each partition; empty: one each.
        streams: whether devices have streams; the CPU has none.
        nesting_ns: of a nested backward pass in flavour ``published``, the host's time to prepare it and the latency of
            its root; how many checkpoints nest before the first comes back hangs on their ratio, a race of the host.
        marks: whether an observer marks backward passes without checkpoint.
        memory: whether to follow the allocators.
        steps: training steps, back to back: the host does not wait for the devices between them.
    """

    components: Components = field(default_factory=Components)
    checkpoint: str = "except_last"
    flavour: str = "current"
    transfer: str = "direct"
    devices: tuple[int, ...] = ()
    streams: bool = True
    nesting_ns: tuple[int, int] = (50_000, 60_000)
    marks: bool = False
    memory: bool = True
    steps: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("checkpoint", CHECKPOINT_MODES), ("flavour", FLAVOURS), ("transfer", _TRANSFERS)):
            if getattr(self, name) not in allowed:
                got = getattr(self, name)
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {got!r}; choose one of them")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}; simulate one step or more")


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

    def events(self, device: str = "cuda") -> list[TimelineEvent]:
        """The timeline, in the order of starts.

        Args:
            device: type of device in the names of devices.
        """
        events = [
            TimelineEvent(
                f"{device}:{task.device}", task.stream, task.kind, task.i, task.j, task.issue_ns / 1e3,
                task.first.start / 1e3, task.last.end / 1e3, task.nbytes,
            )
            for task in self.issued
        ]  # fmt: skip
        return sorted(events, key=lambda event: (event.start_us, event.end_us, event.partition))
