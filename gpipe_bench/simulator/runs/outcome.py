"""What comes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpipe_bench.simulator.host.host import Issued
from gpipe_bench.timeline import TimelineEvent

if TYPE_CHECKING:
    from gpipe_bench.simulator.known_order.grid import Grid

__all__ = ["Run"]


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
    """

    makespan_ns: int
    step_ends_ns: tuple[int, ...]
    issued: tuple[Issued, ...]
    peak_live_bytes: tuple[int, ...]
    peak_allocated_bytes: tuple[int, ...]
    peak_reserved_bytes: tuple[int, ...]
    flushes: tuple[int, ...]
    grid: Grid | None = None

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
