"""Hand-made workloads and machines: nothing here needs a model or hardware."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hypothesis import settings

from gpipe_bench.simulator.steps.run import Run
from gpipe_bench.simulator.workloads.workload import Kernels, SkipWork, SplitWork, TaskWork, Workload

MS = 1_000_000
LETTERS = {
    "forward": "F",
    "recompute": "R",
    "backward": "B",
    "copy": "C",
    "copy_grad": "c",
    "portal": "P",
    "portal_grad": "p",
}
TOLERANCE = 0.01
"""Of peaks of live bytes, against the engine's on the CPU."""


def examples(usual: int) -> settings:
    """So many random cases, times the variable ``EXAMPLES`` of the environment."""
    return settings(max_examples=usual * int(os.environ.get("EXAMPLES", "1")))


@dataclass(frozen=True)
class Plain:
    """A machine on which every copy takes the same time."""

    copy: int = MS // 10
    launch_ns: int = 0
    lock_permille: int = 0
    queue_depth: int = 0
    capacity_bytes: int = 0

    def copy_ns(self, source: int, target: int, nbytes: int) -> int:
        return self.copy

    def buses(self, source: int, target: int) -> tuple[tuple[int, int], ...]:
        return ()


def task(forward: int = 10 * MS, backward: int = 20 * MS, launches: int = 1, **options) -> TaskWork:
    """A task whose backward pass can be split into halves."""
    inputs = Kernels(backward // 2, launches // 2)
    split = SplitWork(inputs, Kernels(backward - inputs.duration_ns, launches - inputs.launches))
    options = {"input_bytes": (1,), "output_bytes": (1,), "split": split, **options}
    return TaskWork(Kernels(forward, launches), Kernels(forward, launches), Kernels(backward, launches), **options)


def workload(m: int, tasks: Sequence[TaskWork], skips: Sequence[tuple[int, int]] = (), **options) -> Workload:
    """m micro-batches of size 1; skips as (source, target)."""
    made = tuple(SkipWork(str(index), source, target, {1: 1}) for index, (source, target) in enumerate(skips))
    return Workload(tuple({1: work} for work in tasks), (1,) * m, made, **options)


class TimedTask(NamedTuple):
    """A task that ran, in nanoseconds."""

    kind: str
    i: int
    j: int
    device: int
    aside: bool
    nbytes: int
    issue_ns: int
    start_ns: int
    end_ns: int

    @property
    def stream(self) -> str:
        return "copy" if self.aside else "compute"


def timed_tasks(run: Run) -> list[TimedTask]:
    """Tasks in the order of issue."""
    *times, turn = run.replay.tasks()
    timed = zip(run.replay.trace.tasks, zip(*times, strict=True), strict=True)
    found = [(when, TimedTask(*task[:6], *own)) for when, (task, own) in zip(turn, timed, strict=True) if when >= 0]
    return [one for _, one in sorted(found)]


def order(run: Run, letters: str = "FRBCcPp") -> list[str]:
    """Tasks in the order of issue: ``R3,2`` is the recomputation of micro-batch 3 on partition 2."""
    names = [f"{LETTERS[one.kind]}{one.i},{one.j}" for one in timed_tasks(run)]
    return [name for name in names if name[0] in letters]
