"""Very long and very deep pipelines: the event simulation of all tasks of a clock-cycle at once, as arrays.

With clock-cycles, Fork and Join, copy streams and a device per partition no host thread has a choice: who issues what,
in which order, is known before anything runs. Then every time is the latest of a few earlier ones, and the tasks of
one cycle do not hang on each other:

    forward    cycle k         tasks (k-j, j)                              backward   tasks (m-1-r, j), r + n-1-j = k
               ┌──────────────── the host's ─────────────────┐             ┌── each device's own host thread ──┐
               copies j-1 -> j, one by one │ every F(i,j)                   R(i,j)   B(i,j)   gradient j -> j-1

The clock of :mod:`gpipe_bench.simulator.virtual_time.clock` gives the same numbers, to the nanosecond; tests hold them
together. One thing is checked on the way: micro-batches i and i+32 share a copy stream, so a host thread must not run
so far ahead of the next one that it issues there first. Where it does, there is no result and the clock has to do it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.simulator.known_order.step_times import COMPUTATIONS, KINDS, Span, Step
from gpipe_bench.simulator.known_order.tables import BACKWARD, FORWARD, RECOMPUTE, Integers, LaunchQueue, Tables
from gpipe_bench.simulator.known_order.turns import Turns
from gpipe_bench.simulator.virtual_time.places import POOL
from gpipe_bench.simulator.workloads.workload import Machine

__all__ = ["Overtaken", "Wavefront"]


class Overtaken(Exception):  # noqa: N818 - not an error: another way has to be taken
    """A host thread ran so far ahead that the order of issue is not the one assumed."""


@dataclass(frozen=True, slots=True)
class _Wave:
    """Tasks of one cycle: partitions ascending, their micro-batches, and the index of each one's size."""

    k: int
    part: slice
    columns: Integers
    microbatches: Integers
    sizes: Integers

    @property
    def where(self) -> tuple[int, slice]:
        return self.k, self.part

    def but_first(self) -> _Wave:
        """Without the first partition, which has no copy into it."""
        cut = int(self.part.start == 0)
        part = slice(self.part.start + cut, self.part.stop)
        return _Wave(self.k, part, self.columns[cut:], self.microbatches[cut:], self.sizes[cut:])


class Wavefront:
    """Runs training steps.

    Args:
        tables: of the workload.
        machine: what launches cost.
        early: whether recomputations do not wait for their gradient.
        steps: how many, back to back.
        turns: whether to note the turns of host threads.

    Attributes:
        steps: those that have run.
        makespan: the end of everything.

    Raises:
        Overtaken: the order of issue is not the one assumed.
    """

    def __init__(self, tables: Tables, machine: Machine, *, early: bool, steps: int, turns: bool = False) -> None:
        self.steps: list[Step] = []
        self._turns = turns
        self._tables = tables
        self._early = early
        self._launch_ns = machine.launch_ns
        self._queue = LaunchQueue(tables, machine.queue_depth, steps) if machine.queue_depth else None
        self._columns = np.arange(tables.n)
        # The last operation of each compute stream, and the time of the calling thread; of what it issued, its entry.
        self._ends = np.zeros(tables.n, dtype=np.int64)
        self._host = self._entered = 0
        self._base = 0
        for _ in range(steps):
            self._run_step()
            self._base += tables.positions
        self.makespan = max(self._host, int(self._ends.max()))

    def _run_step(self) -> None:
        m, n = self._tables.m, self._tables.n
        step = Step()
        for times in (step.issue, step.start, step.end):
            times.update({kind: np.full((m + n - 1, n), -1, dtype=np.int64) for kind in KINDS})
        if self._turns:
            step.turns = Turns((m + n - 1, n))
        self.steps.append(step)
        for k in range(m + n - 1):
            part = slice(max(1 + k - m, 0), min(1 + k, n))
            self._forward(step, self._wave(k, part, k - self._columns[part]))
        step.loss = self._host
        step.last = Span(*(int(times["forward"][-1, -1]) for times in (step.start, step.end)))
        loss = self._kernels(n - 1, self._tables.loss, m, self._host)
        if step.turns is not None:
            step.turns.begin(self._entered)
        done = np.zeros((m + n - 1, n), dtype=np.int64)
        for k in range(m + n - 1):
            part = slice(max(n - 1 - k, 0), min(n - k + m - 1, n))
            self._backward(step, self._wave(k, part, m - 1 - k + n - 1 - self._columns[part]), done, loss)
        self._host = int(done[-1, 0])
        self._entered = 2 * self._host
        last = step.last
        # The calling thread issues the update of every partition.
        for j in range(n):
            self._host = self._kernels(j, self._tables.optimizer, self._tables.positions - 1, self._host)
        step.update, step.last = (self._host, self._entered), last

    def _wave(self, k: int, part: slice, microbatches: Integers) -> _Wave:
        return _Wave(k, part, self._columns[part], microbatches, self._tables.size_of[microbatches])

    # --- forward -------------------------------------------------------------------------------------------------

    def _forward(self, step: Step, wave: _Wave) -> None:
        """A clock-cycle: the calling thread issues copies one by one, then hands the tasks to the workers."""
        if wave.part.stop > 1:
            self._copies(step, wave.but_first())
        hosts = np.full(len(wave.columns), self._host, dtype=np.int64)
        ready = np.maximum(np.maximum(hosts, self._ends[wave.part]), step.end["copy"][wave.where])
        self._host = int(self._compute(FORWARD, wave, (hosts, ready), wave.microbatches)[0].max())
        self._entered = 2 * self._host

    def _copies(self, step: Step, wave: _Wave) -> None:
        """From partition j-1 to j."""
        k, part, ends = wave.k, wave.part, step.end["copy"]
        lengths = self._tables.copy[wave.sizes, wave.columns]
        host = self._launch_ns * self._tables.tensors[wave.sizes, wave.columns]
        issued = self._host + np.cumsum(host)
        issue = issued - host
        ready = np.maximum(issue, step.end["forward"][k - 1, part.start - 1 : part.stop - 1])
        if k >= POOL:
            # The receiver's stream is that of an earlier micro-batch, whose copy onwards comes first.
            inner = max(min(part.stop, self._tables.n - 1) - part.start, 0)
            onwards = ends[k - POOL + 1, part.start + 1 : part.start + 1 + inner]
            np.maximum(ready[:inner], onwards, out=ready[:inner])
        # One at a time on a link.
        start = np.where(lengths > 0, np.maximum(ready, ends[k - 1, part]), ready)
        step.note("copy", wave.where, issue, (start, np.maximum(start + lengths, issued)))
        self._host = int(issued[-1])

    # --- backward ------------------------------------------------------------------------------------------------

    def _backward(self, step: Step, wave: _Wave, done: Integers, loss: int) -> None:
        """The tasks of a cycle; ``done``: when each device's thread was through with a task, by cycle and partition."""
        k, part, tables = wave.k, wave.part, self._tables
        # A task begins when the device's thread has ended the one before, and the next device's thread has sent.
        host = np.full(len(wave.columns), loss, dtype=np.int64)
        arrived = np.zeros(len(wave.columns), dtype=np.int64)
        if k:
            inner = min(part.stop, tables.n - 1) - part.start
            next_ones = slice(part.start + 1, part.start + 1 + inner)
            host[:inner] = done[k - 1, next_ones]
            arrived[:inner] = step.end["copy_grad"][k - 1, next_ones]
            np.maximum(host, done[k - 1, part], out=host)
        turns = step.turns
        if turns is not None:
            turns.first(k, part, host, done[k - 1])
        again = tables.checkpoints[wave.microbatches]
        position = tables.m + 1 + 2 * (tables.m - 1 - wave.microbatches)
        entries = host
        if again.any():
            ready = np.maximum(host, self._ends[part])
            if not self._early:
                np.maximum(ready, arrived, out=ready)
            host, entries = self._compute(RECOMPUTE, wave, (host, ready), position, again)
        if turns is not None:
            turns.backward(host, entries, again)
        ready = np.maximum(np.maximum(host, self._ends[part]), arrived)
        done[k, part], entries = self._compute(BACKWARD, wave, (host, ready), position + 1)
        if turns is not None:
            turns.send(done[k, part].copy(), entries)
        if part.stop > 1:
            self._gradients(step, wave.but_first(), done)
        if turns is not None:
            turns.finish(done[k, part])

    def _gradients(self, step: Step, wave: _Wave, done: Integers) -> None:
        """From partition j to j-1."""
        k, part, ends = wave.k, wave.part, step.end["copy_grad"]
        lengths = self._tables.gradient[wave.sizes, wave.columns]
        issue = done[wave.where].copy()
        ready = np.maximum(issue, step.end["backward"][wave.where])
        if k >= POOL - 1:
            # The receiver's stream was that of micro-batch i + 32, which must be through with it.
            before = k - POOL + 1, slice(part.start - 1, part.stop - 1)
            if (issue <= done[before])[step.end["backward"][before] >= 0].any():
                raise Overtaken
            np.maximum(ready, ends[before], out=ready)
        start = np.where((lengths > 0) & (k > 0), np.maximum(ready, ends[k - 1, part]), ready)
        issued = issue + self._launch_ns * self._tables.tensors[wave.sizes, wave.columns]
        step.note("copy_grad", wave.where, issue, (start, np.maximum(start + lengths, issued)))
        done[wave.where] = issued

    # --- both ----------------------------------------------------------------------------------------------------

    def _compute(
        self,
        what: int,
        wave: _Wave,
        begin: tuple[Integers, Integers],
        position: Integers,
        present: NDArray[np.bool_] | None = None,
    ) -> tuple[Integers, Integers]:
        """Computations; gives when their hosts go on, and their entries.

        Args:
            what: forward pass, recomputation or backward pass.
            wave: their tasks.
            begin: when they are issued, and when they start.
            position: their places in their streams.
            present: which there are; None for all.
        """
        (host, ready), columns = begin, wave.columns
        kinds = self._tables.kind(what, wave.sizes)
        after: Integers = host + self._launch_ns * self._tables.launches[kinds, columns]
        end = np.maximum(ready + self._tables.durations[kinds, columns], after)
        entries = 2 * host
        if self._queue is not None:
            self._queue.started(self._base + position, columns, ready)
            after, entries = self._queue.room(self._base + position, columns, host, after)
        if present is None or present.all():
            self._ends[wave.part] = end
            self.steps[-1].note(COMPUTATIONS[what], wave.where, host, (ready, end))
            return after, entries
        self._ends[wave.part] = np.where(present, end, self._ends[wave.part])
        noted = [np.where(present, times, -1) for times in (host, ready, end)]
        self.steps[-1].note(COMPUTATIONS[what], wave.where, noted[0], (noted[1], noted[2]))
        return np.where(present, after, host), entries

    def _kernels(self, j: int, row: int, position: int, host: int) -> int:
        """Kernels that belong to no task, issued at ``host``; when it goes on."""
        launches, duration = (int(table[row, j]) for table in (self._tables.launches, self._tables.durations))
        if not launches and not duration:
            return host
        start = max(host, int(self._ends[j]))
        issued = host + self._launch_ns * launches
        self._ends[j] = max(start + duration, issued)
        self.steps[-1].last = Span(start, int(self._ends[j]))
        self._entered = 2 * host
        if self._queue is None:
            return issued
        where, which = np.array([self._base + position]), np.array([j])
        self._queue.started(where, which, np.array([start]))
        after, entries = self._queue.room(where, which, np.array([host]), np.array([issued]))
        self._entered = int(entries[0])
        return int(after[0])
