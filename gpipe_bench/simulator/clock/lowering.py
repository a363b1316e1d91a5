"""What is to run as the numbers and columns of ``table.h``."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise

from gpipe_bench.schedules import Schedule
from gpipe_bench.schedules.program import Plan
from gpipe_bench.simulator.clock.latency import latencies
from gpipe_bench.simulator.clock.list_rows import check_devices, chosen_schedule, list_rows, lists_of
from gpipe_bench.simulator.clock.program_rows import cell_rows, program_rows
from gpipe_bench.simulator.clock.settings import Settings
from gpipe_bench.simulator.clock.shared import filled
from gpipe_bench.simulator.clock.transfers import transfer_columns
from gpipe_bench.simulator.workloads.workload import NOTHING, Kernels, Machine, SplitWork, TaskWork, Workload

_Columns = dict[str, Sequence[int]]


class Lowered:
    """A run as arrays.

    Args:
        workload: as :meth:`Workload.chosen` gives it.
        machine: what copies and launches cost.
        settings: of the run.

    Attributes:
        devices: of each partition.
        input: for the clock; it points to arrays that live as long as this.

    Raises:
        ValueError: devices or a schedule do not fit the workload.
        ScheduleError: there is no such schedule.
    """

    def __init__(self, workload: Workload, machine: Machine, settings: Settings) -> None:
        self._work, self._settings = workload, settings
        m, n = workload.m, workload.n
        # Not kept while the clock runs: a large one has millions of actions.
        schedule: Schedule | None = None
        if settings.schedule is not None:
            schedule = chosen_schedule(settings.schedule, m, n, settings.devices)
        # The row of the schedule of each partition, which is a device of the schedule.
        self._rows = tuple(range(n)) if schedule is None else schedule.placement
        self.devices = tuple(settings.devices) or self._rows
        self._check(schedule)
        incoming, outgoing = self._skips()
        self._plan = Plan[int](m, n, settings.components, settings.checkpoint, dict(enumerate(incoming)))
        self._workers = settings.workers and settings.components.clock_cycle and n > 1
        riding = [[] for _ in range(n)] if settings.components.portals else incoming
        staged = settings.transfer == "host"
        transfers, buses = transfer_columns(workload, machine, self.devices, self._rows, riding, staged=staged)
        order, ahead = self._order(schedule)
        columns = {
            **self._work_columns(),
            **_flat("incoming", incoming),
            **_flat("outgoing", outgoing),
            **transfers,
            **order,
            "latencies": self._latencies(),
        }
        numbers = {
            **self._numbers(),
            "buses": buses,
            "lists": len(columns["list_first"]) - 1,
            "latency_count": len(columns["latencies"]),
            "ahead": ahead,
            "launch_ns": machine.launch_ns,
            "lock_permille": machine.lock_permille,
            "queue_depth": machine.queue_depth,
        }
        self.input, self._kept = filled(numbers, columns)

    def _check(self, schedule: Schedule | None) -> None:
        """Raise what is wrong about schedule and devices."""
        if schedule is not None and schedule.splits and not _is_split(self._work):
            rule = "workload must be split into I and W, as the schedule is, got whole backward passes"
            raise ValueError(f"{rule}; build it with split=True")
        check_devices(self._rows, self.devices)

    def _skips(self) -> tuple[list[list[int]], list[list[int]]]:
        """Skips that a task of each partition takes in, and gives out: :func:`gpipe_bench.engine.partition.place`."""
        incoming: list[list[int]] = [[] for _ in range(self._work.n)]
        outgoing: list[list[int]] = [[] for _ in range(self._work.n)]
        for k, skip in enumerate(self._work.skips):
            through = range(skip.source, skip.target + 1)
            for one, other in pairwise((skip.source, skip.target) if self._settings.components.portals else through):
                if one != other:
                    outgoing[one].append(k)
                    incoming[other].append(k)
        return incoming, outgoing

    def _work_columns(self) -> _Columns:
        work = self._work
        updates, sizes = work.optimizer[: work.n], work.microbatch_sizes
        number = {size: place for place, size in enumerate(dict.fromkeys(sizes))}
        # The loss of each micro-batch is its share of the whole, so that all are the whole.
        shares = accumulate(map(abs, sizes), initial=0)
        ends = [share * work.loss.duration_ns // sum(map(abs, sizes)) for share in shares]
        tasks = [works[size] for size in number for works in work.partitions]
        passes = (kernels for task in tasks for kernels in _passes(task))
        # The latencies of the published runs were chosen while launches left queues evenly.
        known = self._settings.flavour != "published"
        return {
            "device_of": self.devices,
            "row_of": self._rows,
            "update_ns": [kernels.duration_ns for kernels in updates],
            "update_launches": [kernels.launches for kernels in updates],
            "update_host_ns": [kernels.host_ns for kernels in updates],
            "class_of": array("i", map(number.__getitem__, sizes)),
            "microbatch_loss_ns": [end - start for start, end in pairwise(ends)],
            "works": array("q", chain.from_iterable(map(_work_row, tasks))),
            **_flat("ends", [one.ends_ns if known and len(one.ends_ns) == one.launches else () for one in passes]),
            "skip_source": [skip.source for skip in work.skips],
            "skip_target": [skip.target for skip in work.skips],
        }

    def _numbers(self) -> dict[str, int]:
        work, settings = self._work, self._settings
        return {
            "microbatches": work.m,
            "partitions": work.n,
            "devices": max(self.devices) + 1,
            "classes": len({*work.microbatch_sizes}),
            "skips": len(work.skips),
            "steps": settings.steps,
            "clock_cycle": settings.schedule is None and settings.components.clock_cycle,
            "updates": min(len(work.optimizer), work.n),
            "loss_ns": work.loss.duration_ns,
            "loss_launches": work.loss.launches,
            "copy_streams": settings.components.copy_streams,
            "has_streams": settings.streams,
            "staged": settings.transfer == "host",
            "workers": self._workers,
            "portals": settings.components.portals,
            "published": settings.flavour == "published",
            "prepare_ns": settings.nesting_ns[0],
        }

    def _order(self, schedule: Schedule | None) -> tuple[_Columns, int]:
        """Who does what in which order, and how many micro-batches lists recompute ahead of their gradients."""
        if schedule is None:
            return program_rows(self._plan) | list_rows([]), 0
        ahead = self._plan.checkpointed if self._settings.components.early_recompute else 0
        # A thread for each accelerator; on the CPU one for each device of the schedule; or one for all.
        groups: Sequence[int] = self.devices if self._settings.streams else self._rows
        if not self._workers:
            groups = (0,) * self._work.n
        lists, ahead = lists_of(schedule, self._rows, groups, ahead)
        return cell_rows(self._plan, lists) | list_rows(lists), ahead

    def _latencies(self) -> Sequence[int]:
        """Of the roots of all nested passes that there can be."""
        settings, (_, mean) = self._settings, self._settings.nesting_ns
        if settings.seed is None or settings.flavour != "published" or not self._plan.checkpointed:
            return (mean,)
        count = settings.steps * self._work.n * self._plan.checkpointed
        return array("q", islice(latencies(mean, settings.seed), count))


def _flat(name: str, lists: Sequence[Sequence[int]]) -> _Columns:
    return {f"{name}_first": [0, *accumulate(map(len, lists))], name: [*chain.from_iterable(lists)]}


def _passes(work: TaskWork) -> tuple[Kernels, ...]:
    """The work of each kind of computation."""
    split = work.split or SplitWork(NOTHING, NOTHING)
    return work.forward, work.recompute, work.backward, split.inputs, split.weights


def _work_row(work: TaskWork) -> Iterator[int]:
    """The numbers of each kind of computation, then output bytes, nodes, and whether it learns."""
    for kernels in _passes(work):
        yield from (kernels.duration_ns, kernels.launches, kernels.adding_ns, kernels.adding_launches)
    yield sum(work.output_bytes)
    yield work.nodes
    yield work.learns


def _is_split(workload: Workload) -> bool:
    works = (work for works in workload.partitions for work in works.values())
    return all(work.split is not None or not work.learns for work in works)
