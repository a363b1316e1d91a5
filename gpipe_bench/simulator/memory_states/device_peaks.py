"""Exact peaks of memory of runs whose times are known beforehand, device by device.

Without a full device memory decides nothing about time. So with the times of
:mod:`gpipe_bench.simulator.known_order.host_threads` the order of a device's requests is known, and what had come back
before each; what they do to free memory is looked up in :mod:`gpipe_bench.simulator.memory_states.home_states`. Bytes
in use are sums along the order:

    forward    i ascending     copy (i, j) comes, copy (i-1, j+1) goes, F(i,j), of its inputs go those it does not keep
                               and does not pass on
    backward   i descending    gradient of (i, j+1) comes     among R(i,j), B(i,j), gradient of (i, j) goes, by time
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.simulator.known_order.step_times import Flags, Integers, Step
from gpipe_bench.simulator.known_order.turns import Unclear
from gpipe_bench.simulator.memory.passes import alike
from gpipe_bench.simulator.memory_states.come_backs import counted
from gpipe_bench.simulator.memory_states.copy_states import CopyStates
from gpipe_bench.simulator.memory_states.covered import is_covered, not_kept, passed_on
from gpipe_bench.simulator.memory_states.device_times import DeviceTimes
from gpipe_bench.simulator.memory_states.home_states import HomeStates
from gpipe_bench.simulator.memory_states.skip_lives import Lives, touched
from gpipe_bench.simulator.memory_states.skip_peaks import skip_peaks
from gpipe_bench.simulator.memory_states.skip_slots import Slots
from gpipe_bench.simulator.memory_states.skip_states import SkipHomeStates
from gpipe_bench.simulator.memory_states.skip_times import SkipTimes
from gpipe_bench.simulator.virtual_time.places import POOL
from gpipe_bench.simulator.workloads.workload import TaskWork, Workload

__all__ = ["DevicePeaks"]

_Bytes = NDArray[np.int64]
"""(requests, 2): as allocated, and as asked for."""

_Places = tuple[Integers, Integers, Integers]
"""Step, way (0 for copies, 1 for gradients) and number of each of some copies."""


class DevicePeaks:
    """Finds the peaks of one partition's device after the other.

    Args:
        workload: what ran.
        checkpoints: (m,) whether each micro-batch is checkpointed.
        steps: its times.
    """

    def __init__(self, workload: Workload, checkpoints: Flags, steps: Sequence[Step]) -> None:
        self._work, self._checkpoints, self._steps = workload, checkpoints, steps
        self._m, self._n = workload.m, workload.n
        self._sizes = workload.microbatch_sizes
        # In the order of the backward pass.
        self._again: Flags = checkpoints[::-1]
        self._alike = alike(one for works in workload.partitions for one in works.values())
        self._homes: dict[object, HomeStates] = {}
        self._passes: dict[HomeStates, Integers] = {}
        self._copies = CopyStates()
        self._slots = _Slots(self._m, len(steps))
        self._skipped = touched(workload)
        self.check(workload)

    @staticmethod
    def check(workload: Workload) -> None:
        """Raise :class:`Unclear` unless tensors live as :class:`HomeStates` has it."""
        skipped = touched(workload)
        for j, works in enumerate(workload.partitions):
            inner = 0 < j < workload.n - 1
            if j in skipped:
                if not Lives(workload, j).known():
                    raise Unclear
            elif not all(is_covered(work, inner=inner) for work in works.values()):
                raise Unclear

    def of(self, j: int) -> tuple[int, int, int]:
        """Peaks of live, allocated and reserved bytes of partition j's device.

        Raises:
            Unclear: tensors come back in another order.
        """
        times = DeviceTimes(self._steps, j, self._m, self._n, self._again)
        if j in self._skipped:
            return self._with_skips(j, times)
        home = self._home(j)
        if home not in self._passes:
            self._passes[home] = self._numbers(home, last=j == self._n - 1)
        rows, reserved = home.run(home.codes(self._passes[home], times.back()))
        copied, gone, more = self._copied(j, times)
        base = np.array(home.base)
        peak = base
        per_step = len(rows) // len(self._steps)
        for number in range(len(self._steps)):
            done = rows[number * per_step : (number + 1) * per_step]
            change, growth = self._sequence(done, (copied[number], gone[number]), times.order(number))
            before = base + np.cumsum(change, axis=0) - change
            peak = np.maximum(peak, (before + growth).max(axis=0))
            base = base + change.sum(axis=0)
        return int(peak[1]), int(peak[0]), reserved + more

    def _with_skips(self, j: int, times: DeviceTimes) -> tuple[int, int, int]:
        lives, again = Lives(self._work, j), self._checkpoints
        home = SkipHomeStates(self._work, lives, checkpoints=bool(again.any()))
        passes = self._numbers(home, last=j == self._n - 1)
        slots = Slots(lives, self._sizes, again, SkipTimes(self._steps, self._m, self._n), self._n)
        peaks = skip_peaks(home, passes, slots, times, again)
        home.forget()
        return peaks

    def forget(self) -> None:
        """Let go of what was found out; no peaks can be found afterwards."""
        for home in self._homes.values():
            home.forget()

    def _home(self, j: int) -> HomeStates:
        """Those of partitions that are alike are one."""
        work = self._work
        edges = j == 0, j == self._n - 1
        own = work.static[j : j + 1], work.static_bytes[j : j + 1]
        key = *edges, *own, *(self._alike[id(one)] for one in work.partitions[j].values())
        if key not in self._homes:
            self._homes[key] = HomeStates(work, j, checkpoints=bool(self._again.any()))
        return self._homes[key]

    def _numbers(self, home: HomeStates, *, last: bool) -> Integers:
        """The passes of all steps by number."""
        tasks = list(zip(self._sizes, self._checkpoints.tolist(), strict=True))
        step = [home.number("forward" if again else "forward_task", size) for size, again in tasks]
        if last:
            step.append(home.number("loss"))
        for i, (size, again) in reversed(list(enumerate(tasks))):
            if again:
                step.append(home.number("recompute", size))
            step.append(home.number("backward", size, (not again, min(self._m - 1 - i, 2), i == 0)))
        ends = ["renew"] * (len(self._steps) - 1) + ["update"]
        return np.array([number for end in ends for number in (*step, home.number(end))])

    def _copied(self, j: int, times: DeviceTimes) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Bytes of copies.

        Returns:
            Those that come with each copy and each gradient, (steps, 2, m, 2); of those that come with a copy, what
            goes with the forward pass and what goes when it has been passed on, (steps, 2, m, 2); and what copy streams
            reserve.
        """
        copies, work, sizes = self._copies, self._work, self._sizes
        arriving = {size: (one.input_bytes, *_leaving_early(one)) for size, one in work.partitions[j].items()}
        coming = {size: one.input_bytes for size, one in work.partitions[j + 1].items()} if j + 1 < self._n else {}
        tasks = zip((arriving[size] for size in sizes), self._checkpoints.tolist(), strict=True)
        inputs = [(nbytes, *(((), ()) if again or not j else gone)) for (nbytes, *gone), again in tasks]
        arrive = [copies.number("arrive", *one) for one in inputs]
        leave = [copies.number("leave", coming.get(size, ())) for size in reversed(sizes)]
        numbers = np.array([arrive, leave])
        early = np.array([[bool(gone), bool(sent)] for _, gone, sent in inputs])
        counts = times.copies_back(early)
        found, going = np.zeros((2, len(self._steps), 2, self._m, 2), dtype=np.int64)
        reserved = 0
        for place, counts_back in self._slots.of(counts, early, both=j > 0):
            codes = copies.codes(numbers[place[1], place[2]], [counted(counts_back)])
            rows, more = copies.run(codes)
            found[place], going[place] = rows[:, [0, 2]], rows[:, [4, 5]]
            reserved += more
        # Where there are inputs of both kinds, and so no others, these are the latter.
        first, sent = early.T[:, None, :, None]
        gone = np.where(first & sent, found[:, 0] - going[:, 0], np.where(first, going[:, 0], 0))
        return found, np.stack([gone, np.where(sent, going[:, 0], 0)], axis=1), reserved

    def _sequence(
        self, rows: Integers, copies: tuple[NDArray[np.int64], NDArray[np.int64]], order: Integers
    ) -> tuple[_Bytes, _Bytes]:
        """By how much bytes in use change with each request of a step, and by how much they grow on the way.

        Args:
            rows: of the passes, as :meth:`gpipe_bench.simulator.memory_states.pool_states.Automaton.run` gives them.
            copies: of a step, (2, m, 2) bytes that come with each copy and each gradient, and (2, m, 2) of those of
                copies that go with the forward pass, and that go when they have been passed on.
            order: places of the gradients among what the device's own thread does.
        """
        m, again, (copied, (gone, passed)) = self._m, self._again, copies
        used, grown, sent = rows[:, [0, 2]], rows[:, [1, 3]], rows[:, [4, 5]]
        forward, backward = np.zeros((2, 2, m, 3, 2), dtype=np.int64)
        forward[:, :, 0] = copied[0]
        sent[:m] += passed
        forward[0, 1:, 1] = -sent[: m - 1]
        forward[:, :, 2] = used[:m] - gone, grown[:m]
        # The loss, which only the last device has, and the backward pass; its last passes of each task.
        begin = len(rows) - 1 - m - int(again.sum())
        last = begin - 1 + np.cumsum(1 + again)
        backward[:, again, 0] = used[last[again] - 1], grown[last[again] - 1]
        backward[:, :, 1] = used[last] - (copied[0] - gone - passed)[::-1] - copied[1], grown[last]
        backward[0, :, 2] = -sent[last]
        changes, growths = (
            np.concatenate(
                [
                    forward[way].reshape(-1, 2),
                    -sent[m - 1 : m] * (1 - way),
                    passes[m:begin],
                    np.insert(backward[way].reshape(-1, 2), order, copied[1][: len(order)], axis=0),
                    passes[-1:],
                ]
            )
            for way, passes in enumerate((used, grown))
        )
        return changes, growths


class _Slots:
    """Which micro-batches share a copy stream: i and i + 32.

    Args:
        m: micro-batches.
        steps: how many.
    """

    def __init__(self, m: int, steps: int) -> None:
        self._steps = steps
        self._slot: Integers = np.arange(m) % POOL
        self._places: list[_Places] = []
        self._counts: dict[bytes, list[Integers]] = {}
        for slot in range(min(m, POOL)):
            own = np.arange(slot, m, POOL)
            # Copies of a step in the order of i, then gradients, whose order is that of the backward pass.
            way = np.repeat([0, 1], len(own))
            which = np.concatenate([own, m - 1 - own[::-1]])
            step = np.repeat(np.arange(steps), 2 * len(own))
            self._places.append((step, np.tile(way, steps), np.tile(which, steps)))

    def of(self, back: NDArray[np.int64], early: Flags, *, both: bool) -> Iterator[tuple[_Places, Integers]]:
        """For each copy stream the places of what it gets, and how much of its own had come back before each.

        Args:
            back: (steps, 2, m) how many groups had come back before each copy and each gradient.
            early: (m, 2) which micro-batches have groups that come back in the forward pass.
            both: whether there are copies, and not only gradients.
        """
        for places, counts in zip(self._places, self._counted(early), strict=True):
            step, way, which = places
            chosen = slice(None) if both else way == 1
            own = step[chosen], way[chosen], which[chosen]
            yield own, counts[np.maximum.accumulate(back[own])]

    def _counted(self, early: Flags) -> list[Integers]:
        """For each copy stream, how many of the groups that came back first are its own."""
        key = early.tobytes()
        if key not in self._counts:
            first = np.repeat(self._slot, early.sum(axis=1))
            groups = np.tile(np.concatenate([first, self._slot[::-1]]), self._steps)
            self._counts[key] = [np.concatenate([[0], np.cumsum(groups == slot)]) for slot in range(len(self._places))]
        return self._counts[key]


def _leaving_early(work: TaskWork) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Places of the inputs that go with the forward pass of a task, and when they have been passed on.

    Raises:
        Unclear: there are both of them and others.
    """
    gone, passed = not_kept(work), passed_on(work)
    both = tuple(place for place in gone if place not in passed), tuple(place for place in gone if place in passed)
    if all(both) and len(gone) < len(work.input_bytes):
        raise Unclear
    return both
