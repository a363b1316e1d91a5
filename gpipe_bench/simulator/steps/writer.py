"""Writes the rows of a training step, and repeats them.

Most rows differ in a few numbers only: all kernels of a pass of one partition, all events of one stream. What such rows
share is a pattern, which is kept once; a row is the number of its pattern and what it has of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

from gpipe_bench.machine.trace import HOST, KINDS, ROW_TYPE, Row, Trace, TracedTask
from gpipe_bench.simulator.workloads.workload import Kernels

Stream = tuple[int, int]
"""A device, and a stream of it: 0 is the default one."""

CALLER: Final = 0
"""The host thread that calls the pipeline."""

NOWHERE: Final = (HOST, 0)
"""Where no stream is: the host."""

_KIND: Final = {kind: number for number, kind in enumerate(KINDS)}
_NO_FIELDS: Final = dict.fromkeys(ROW_TYPE.names or (), 0)
_OWN: Final = ("thread", "version", "pass", "task", "bytes")
"""Fields that each row has of its own."""


class TraceWriter:
    """Rows of host threads, in an order in which a row comes after those that it waits for.

    Attributes:
        within: version of the backward pass that rows belong to from now on, or 0.
        tasks: that rows belong to, from 1.
    """

    def __init__(self) -> None:
        self.within = 0
        self.tasks: list[TracedTask] = []
        self._patterns: dict[tuple[int, ...], int] = {}
        self._plain_patterns: dict[tuple[str, Stream, Stream, int], int] = {}
        self._rows = array("q")
        self._blocks = array("q")
        self._ends = array("q")
        # By identity; each value holds its key, whose number would otherwise be free for another one.
        self._first_end: dict[int, tuple[int, Kernels]] = {}
        self._names: dict[str, int] = {"": 0}
        self._versions = self._nodes = self._gradients = self._meetings = 0

    # --- patterns -----------------------------------------------------------------------------------------------------

    def kernels(self, stream: Stream, work: Kernels, name: str, *, gradients: int = 0) -> int:
        """A pattern: kernels of one stream, one after the other.

        ``gradients``: of which parameters they may add some, or 0.
        """
        first = 0
        if work.ends_ns and len(work.ends_ns) == work.launches:
            if id(work) not in self._first_end:
                self._first_end[id(work)] = len(self._ends) + 1, work
                self._ends.extend(work.ends_ns)
            first, _ = self._first_end[id(work)]
        adds = bool(gradients and work.adding_launches)
        self._gradients = max(self._gradients, gradients * adds)
        return self._pattern(
            "kernel", stream, name=name, duration_ns=work.duration_ns, launches=work.launches, first_end=first,
            adding_ns=work.adding_ns * adds, adding_launches=work.adding_launches * adds, gradients=gradients * adds,
        )  # fmt: skip

    def copies(self, sender: Stream, receiver: Stream, *, ns: int, launches: int, joined: int = 0) -> int:
        """A pattern: copies, one after the other, between devices, where both streams meet; or with the host.

        ``joined``: the thread issues more at once: 1 and how many launches follow.
        """
        name, streams = "device_to_device", (sender, receiver)
        if receiver == NOWHERE:
            name = "device_to_host"
        elif sender == NOWHERE:
            name, streams = "host_to_device", (receiver, sender)
        return self._pattern("copy", *streams, name=name, duration_ns=ns, launches=launches, joined=joined)

    def part(self, stream: Stream, peer: Stream, *, meeting: int, ns: int, launches: int) -> int:
        """A pattern: one end of a message, which begins when both have come to the heads of their streams.

        ``peer``: of the end that sends, the stream of the other end; else nowhere. ``meeting``: its number, from 1.
        """
        self._meetings = max(self._meetings, meeting)
        return self._pattern("meet", stream, peer, duration_ns=ns, launches=launches, meeting=meeting, parts=2)

    def _pattern(
        self, kind: str, stream: Stream, peer: Stream = NOWHERE, *, name: str = "", duration_ns: int = -1, **more: int
    ) -> int:
        fields = {
            **_NO_FIELDS, **more, "kind": _KIND[kind], "name": self._names.setdefault(name, len(self._names)),
            "device": stream[0], "stream": stream[1], "peer": peer[0], "peer_stream": peer[1],
            "duration_ns": duration_ns,
        }  # fmt: skip
        return self._patterns.setdefault((*fields.values(),), len(self._patterns))

    def _plain(self, kind: str, stream: Stream = NOWHERE, peer: Stream = NOWHERE, duration_ns: int = -1) -> int:
        """A pattern: rows of a kind that has no name."""
        key = kind, stream, peer, duration_ns
        found = self._plain_patterns.get(key)
        if found is None:
            found = self._plain_patterns[key] = self._pattern(kind, stream, peer, duration_ns=duration_ns)
        return found

    # --- rows ---------------------------------------------------------------------------------------------------------

    def issue(
        self, thread: int, pattern: int, *, version: int = 0, task: int = 0, nbytes: int = 0, touched: int = 0
    ) -> None:
        """A row of a pattern; ``touched``: how many blocks at the end of those so far are its own, the last written."""
        self._rows.extend((pattern, thread, version, self.within, task, nbytes, touched))

    def task(self, made: TracedTask) -> int:
        """The number of a new task."""
        self.tasks.append(made)
        return len(self.tasks)

    def tell(self, thread: int, task: int, sender: Stream = NOWHERE, receiver: Stream = NOWHERE) -> None:
        """A thread begins a task that is no kernel and no copy between devices, or has issued all of it."""
        self.issue(thread, self._plain("task", sender, receiver), task=task)

    def update(self, thread: int, stream: Stream, host_ns: int) -> None:
        """The host goes through the parameters of an update."""
        self.issue(thread, self._plain("update", stream, duration_ns=host_ns))

    def order(self, thread: int, waiter: Stream, awaited: Stream) -> None:
        """What is issued to a stream from now on begins after everything issued to another one so far."""
        if waiter != awaited:
            self.wait(thread, waiter, self.record(thread, awaited))

    def record(self, thread: int, stream: Stream) -> int:
        """An event: it has happened when everything issued to a stream so far has ended."""
        version = self.version()
        self.issue(thread, self._plain("record", stream), version=version)
        return version

    def wait(self, thread: int, stream: Stream, event: int) -> None:
        """What is issued to a stream from now on begins after an event."""
        self.issue(thread, self._plain("wait", stream), version=event)

    def signal(self, thread: int) -> int:
        """What awaits this version comes after all that a thread has done."""
        version = self.version()
        self.plain("signal", thread, version)
        return version

    def awaits(self, thread: int, version: int) -> None:
        """A thread waits for a signal."""
        self.plain("await", thread, version)

    def busy(self, thread: int, ns: int) -> None:
        """A thread is busy."""
        self.issue(thread, self._plain("host", duration_ns=ns))

    def plain(self, kind: str, thread: int, version: int = 0) -> None:
        """A row of a kind that has nothing but a version."""
        self.issue(thread, self._plain(kind), version=version)

    def node(
        self, kind: str, thread: int, rank: int, *, own: int, waits_for: Sequence[int] = (), version: int = 0
    ) -> None:
        """A node of autograd, or a part of one that begins a nested pass: its number, and those that wait for it."""
        self._blocks.extend(waits_for)
        self._blocks.append(own)
        self._nodes = max(self._nodes, own)
        self.issue(thread, self._plain(kind), version=version, nbytes=rank, touched=len(waits_for) + 1)

    def version(self) -> int:
        """A new one."""
        self._versions += 1
        return self._versions

    # --- the trace ----------------------------------------------------------------------------------------------------

    def trace(self, steps: int) -> Trace:
        """All rows, and the same again for each further step: with versions, nodes, gradients and tasks of its own."""
        pattern, *own, touched = np.frombuffer(self._rows, np.int64).reshape(-1, len(_OWN) + 2).T.copy()
        patterns, blocks = np.array([*self._patterns], ROW_TYPE), np.array(self._blocks)
        ends = np.cumsum(touched) * (touched > 0)
        counts = {"version": self._versions, "pass": self._versions, "task": len(self.tasks)}
        rows = np.empty((steps, len(pattern)), ROW_TYPE)
        accesses = np.zeros((steps, len(blocks), 3), np.int64)
        for step, made in enumerate(rows):
            # "clip" spares a copy; all numbers are in range.
            np.take(patterns, pattern, out=made, mode="clip")
            for name, column in zip(_OWN, own, strict=True):
                made[name] = column + step * counts.get(name, 0) * (column > 0)
            made["end_write"] = end = step * len(blocks) + ends
            made["first_write"] = end - (touched > 0)
            made["first_read"] = end - touched
            accesses[step, :, 0] = blocks + step * self._nodes
            for name, count in (("gradients", self._gradients), ("meeting", self._meetings)):
                patterns[name] += count * (patterns[name] > 0)
        trace = Trace(names=tuple(self._names))
        trace.rows = (Row * rows.size).from_buffer(rows.data)
        trace.accesses.frombytes(accesses.tobytes())
        trace.launch_ends, trace.tasks = self._ends, self.tasks * steps
        return trace
