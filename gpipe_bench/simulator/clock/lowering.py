"""What is to run as the numbers and columns of ``table.h``."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise

from gpipe_bench.program import Plan
from gpipe_bench.schedules import Schedule
from gpipe_bench.simulator.clock.latency import latencies
from gpipe_bench.simulator.clock.list_rows import chosen_schedule, list_rows, lists_of, reversed_lists
from gpipe_bench.simulator.clock.program_rows import program_rows
from gpipe_bench.simulator.clock.settings import Settings
from gpipe_bench.simulator.clock.shared import filled
from gpipe_bench.simulator.clock.transfers import Transfers
from gpipe_bench.simulator.workloads.workload import NOTHING, Machine, SplitWork, TaskWork, Workload

__all__ = ["Lowered"]


class Lowered:
    """A run as arrays.

    Args:
        workload: as :meth:`Workload.chosen` gives it.
        machine: what copies and launches cost.
        settings: of the run.

    Attributes:
        devices: of each partition.
        rows: the row of the schedule of each partition, which is a device of the schedule.
        plan: of the forward program.
        input: for the clock; it points to arrays that live as long as this.

    Raises:
        ValueError: devices or a schedule do not fit the workload.
        ScheduleError: there is no such schedule.
    """

    def __init__(self, workload: Workload, machine: Machine, settings: Settings) -> None:
        self._work, self._machine, self._settings = workload, machine, settings
        m, n = workload.m, workload.n
        components = settings.components
        self._schedule: Schedule | None = None
        if settings.schedule is not None:
            self._schedule = chosen_schedule(settings.schedule, m, n, settings.devices)
            if self._schedule.splits and not _is_split(workload):
                rule = "workload must be split into I and W, as the schedule is, got whole backward passes"
                raise ValueError(f"{rule}; build it with split=True")
        self.rows = tuple(range(n)) if self._schedule is None else self._schedule.placement
        self.devices = tuple(settings.devices) or self.rows
        if len(self.devices) != n:
            raise ValueError(f"devices must be one per partition, got {len(self.devices)} for {n}; name each")
        if len({*zip(self.rows, self.devices, strict=True)}) > len({*self.rows}):
            got = f"{[*self.devices]} for {[*self.rows]}"
            raise ValueError(f"devices must be one for each row of the schedule, got {got}; move partitions")
        crossing = [(k, skip) for k, skip in enumerate(workload.skips) if skip.source != skip.target]
        arrivals: dict[int, list[int]] = {}
        for k, skip in crossing:
            arrivals.setdefault(skip.target, []).append(k)
        self.plan = Plan[int](m, n, components, settings.checkpoint, arrivals)
        self._ahead = self.plan.checkpointed if components.early_recompute else 0
        self.workers = settings.workers and components.clock_cycle and n > 1
        self._incoming, self._outgoing = (self._skips_of(outgoing=outgoing) for outgoing in (False, True))
        riding = [[] for _ in range(n)] if components.portals else self._incoming
        self._transfers = Transfers(
            workload, machine, self.devices, self.rows, riding, staged=settings.transfer == "host"
        )
        self.input, self._kept = filled(*self._rows())

    def _skips_of(self, *, outgoing: bool) -> list[list[int]]:
        """Skips that a task of each partition takes in or gives out, as :func:`gpipe_bench.engine.partition.place`."""
        found: list[list[int]] = [[] for _ in range(self._work.n)]
        for k, skip in enumerate(self._work.skips):
            if self._settings.components.portals:
                if skip.source != skip.target:
                    found[skip.source if outgoing else skip.target].append(k)
                continue
            for j in range(skip.source, skip.target):
                found[j if outgoing else j + 1].append(k)
        return found

    def _rows(self) -> tuple[dict[str, int], dict[str, Sequence[int]]]:
        work, transfers = self._work, self._transfers
        sizes = [*dict.fromkeys(work.microbatch_sizes)]
        number = {size: place for place, size in enumerate(sizes)}
        columns: dict[str, Sequence[int]] = {
            "device_of": self.devices,
            "row_of": self.rows,
            **_flat("incoming", self._incoming),
            **_flat("outgoing", self._outgoing),
            "update_ns": [kernels.duration_ns for kernels in work.optimizer[: work.n]],
            "update_launches": [kernels.launches for kernels in work.optimizer[: work.n]],
            "class_of": array("i", map(number.__getitem__, work.microbatch_sizes)),
            "microbatch_loss_ns": self._losses(),
            "works": array("q", self._works(sizes)),
            "skip_source": [skip.source for skip in work.skips],
            "skip_target": [skip.target for skip in work.skips],
            **transfers.columns,
            **self._order(),
            "latencies": self._latencies(),
        }
        return self._numbers(columns, len(sizes)), columns

    def _works(self, sizes: Sequence[int]) -> Iterator[int]:
        for size in sizes:
            for works in self._work.partitions:
                yield from _work_row(works[size])

    def _numbers(self, columns: dict[str, Sequence[int]], classes: int) -> dict[str, int]:
        work, machine, settings = self._work, self._machine, self._settings
        return {
            "microbatches": work.m,
            "partitions": work.n,
            "devices": max(self.devices) + 1,
            "classes": classes,
            "skips": len(work.skips),
            "buses": self._transfers.buses,
            "steps": settings.steps,
            "forward_program": self._schedule is None,
            "clock_cycle": settings.components.clock_cycle,
            "lists": len(columns["list_first"]) - 1,
            "latency_count": len(columns["latencies"]),
            "updates": len(columns["update_ns"]),
            "launch_ns": machine.launch_ns,
            "queue_depth": machine.queue_depth,
            "loss_ns": work.loss.duration_ns,
            "loss_launches": work.loss.launches,
            "copy_streams": settings.components.copy_streams,
            "has_streams": settings.streams,
            "staged": settings.transfer == "host",
            "workers": self.workers,
            "portals": settings.components.portals,
            "published": settings.flavour == "published",
            "barrier": "barrier" not in settings.left_out,
            "ranked": "rank" not in settings.left_out,
            "zeros_elsewhere": "zeros" in settings.left_out,
            "prepare_ns": settings.nesting_ns[0],
            "checkpointed": self.plan.checkpointed,
            "ahead": self._ahead,
            "loss_per_microbatch": self._schedule is not None,
        }

    def _order(self) -> dict[str, Sequence[int]]:
        """Who does what in which order."""
        # A thread for each accelerator; on the CPU one for each device of the schedule; or one for all.
        groups: Sequence[int] = self.devices if self._settings.streams else self.rows
        if not self.workers:
            groups = (0,) * self._work.n
        if self._schedule is not None:
            lists, self._ahead = lists_of(self._schedule, self.rows, groups, self._ahead)
            return {"sort_of": (), "steps_of": ()} | list_rows(lists)
        lists = reversed_lists(self.plan, groups) if self._settings.backward == "scheduled" else []
        return program_rows(self.plan) | list_rows(lists)

    def _latencies(self) -> Sequence[int]:
        """Of the roots of all nested passes that there can be."""
        settings, (_, mean) = self._settings, self._settings.nesting_ns
        if settings.seed is None or settings.flavour != "published" or not self.plan.checkpointed:
            return (mean,)
        count = settings.steps * self._work.n * self.plan.checkpointed
        return array("q", islice(latencies(mean, settings.seed), count))

    def _losses(self) -> Sequence[int]:
        """The loss of each micro-batch: its share of the whole, so that all are the whole."""
        sizes = [abs(size) for size in self._work.microbatch_sizes]
        ends = [0, *(end * self._work.loss.duration_ns // sum(sizes) for end in accumulate(sizes))]
        return [end - start for start, end in pairwise(ends)]


def _flat(name: str, lists: Sequence[Sequence[int]]) -> dict[str, Sequence[int]]:
    return {f"{name}_first": [0, *accumulate(map(len, lists))], name: [*chain.from_iterable(lists)]}


def _work_row(work: TaskWork) -> Iterator[int]:
    """Durations and launches of each kind of computation, then output bytes, nodes, and whether it learns."""
    split = work.split or SplitWork(NOTHING, NOTHING)
    for kernels in (work.forward, work.recompute, work.backward, split.inputs, split.weights):
        yield kernels.duration_ns
        yield kernels.launches
    yield sum(work.output_bytes)
    yield work.nodes
    yield work.learns


def _is_split(workload: Workload) -> bool:
    works = (work for works in workload.partitions for work in works.values())
    return all(work.split is not None or not work.learns for work in works)
