"""Writes the rows of a training step, and repeats them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

from gpipe_bench.machine.trace import HOST, KINDS, ROW, Row, Trace, TracedTask
from gpipe_bench.simulator.workloads.workload import Kernels

Stream = tuple[int, int]
"""A device, and a stream of it: 0 is the default one."""

CALLER: Final = 0
"""The host thread that calls the pipeline."""

_NOWHERE: Final = (HOST, 0)
_KIND: Final = {kind: number for number, kind in enumerate(KINDS)}


class TraceWriter:
    """Rows of host threads, in an order in which a row comes after those that it waits for.

    Attributes:
        within: version of the backward pass that rows belong to from now on, or 0.
    """

    def __init__(self) -> None:
        self.within = 0
        self._tasks: list[TracedTask] = []
        self._rows: list[tuple[int, ...]] = []
        self._accesses = array("q")
        self._ends = array("q")
        self._first_end: dict[int, int] = {}
        self._names: dict[str, int] = {"": 0}
        self._versions = self._nodes = self._gradients = 0

    def task(self, *fields: Any, **others: Any) -> int:
        """The number of a new task, with the fields of :class:`~gpipe_bench.machine.trace.TracedTask`."""
        self._tasks.append(TracedTask(*fields, **others))
        return len(self._tasks)

    def tell(self, thread: int, task: int, sender: Stream = _NOWHERE, receiver: Stream = _NOWHERE) -> None:
        """A thread begins a task that is no kernel and no copy between devices, or has issued all of it."""
        self._add("task", thread, sender, peer=receiver, task=task)

    def kernels(
        self, thread: int, stream: Stream, work: Kernels, name: str, *, task: int = 0, gradients: int = 0
    ) -> None:
        """Kernels of one stream, one after the other; ``gradients``: of which parameters they may add some, or 0."""
        first = 0
        if work.ends_ns and len(work.ends_ns) == work.launches:
            first = self._first_end.get(id(work), 0)
            if not first:
                first = self._first_end[id(work)] = len(self._ends) + 1
                self._ends.extend(work.ends_ns)
        adds = bool(gradients and work.adding_launches)
        self._gradients = max(self._gradients, gradients * adds)
        self._add(
            "kernel", thread, stream, ns=work.duration_ns, launches=work.launches, name=name, first_end=first,
            task=task, adding_ns=work.adding_ns * adds, adding=work.adding_launches * adds,
            gradients=gradients * adds,
        )  # fmt: skip

    def update(self, thread: int, stream: Stream, host_ns: int) -> None:
        """The host goes through the parameters of an update."""
        self._add("update", thread, stream, ns=host_ns)

    def copy(
        self, thread: int, name: str, stream: Stream, peer: Stream = _NOWHERE, *, ns: int, launches: int, nbytes: int,
        task: int, joined: int = 0,
    ) -> None:  # fmt: skip
        """Copies, one after the other: from a stream's device, where both streams meet; or from the host, or to it.

        ``joined``: the thread issues more at once: 1 and how many launches follow.
        """
        self._add(
            "copy", thread, stream, ns=ns, launches=launches, nbytes=nbytes, name=name, peer=peer, task=task,
            joined=joined,
        )  # fmt: skip

    def order(self, thread: int, waiter: Stream, awaited: Stream) -> None:
        """What is issued to a stream from now on begins after everything issued to another one so far."""
        if waiter != awaited:
            version = self.version()
            self._add("record", thread, awaited, version=version)
            self._add("wait", thread, waiter, version=version)

    def signal(self, thread: int) -> int:
        """What awaits this version comes after all that a thread has done."""
        version = self.version()
        self._add("signal", thread, version=version)
        return version

    def awaits(self, thread: int, version: int) -> None:
        """A thread waits for a signal."""
        self._add("await", thread, version=version)

    def busy(self, thread: int, ns: int) -> None:
        """A thread is busy."""
        self._add("host", thread, ns=ns)

    def plain(self, kind: str, thread: int, version: int = 0) -> None:
        """A row of a kind that has nothing but a version."""
        self._add(kind, thread, version=version)

    def node(
        self, kind: str, thread: int, rank: int, *, own: int, waits_for: Sequence[int] = (), version: int = 0
    ) -> None:
        """A node of autograd, or a part of one that begins a nested pass: its number, and those that wait for it."""
        first = len(self._accesses) // 3
        for number in (*waits_for, own):
            self._accesses.extend((number, 0, 0))
        self._nodes = max(self._nodes, own)
        middle = first + len(waits_for)
        self._add(kind, thread, nbytes=rank, version=version, accesses=(first, middle, middle + 1))

    def version(self) -> int:
        """A new one."""
        self._versions += 1
        return self._versions

    def _add(
        self, kind: str, thread: int, stream: Stream = _NOWHERE, *, nbytes: int = 0, ns: int = -1, version: int = 0,
        accesses: tuple[int, int, int] = (0, 0, 0), adding_ns: int = 0, first_end: int = 0, name: str = "",
        peer: Stream = _NOWHERE, launches: int = 0, adding: int = 0, gradients: int = 0, task: int = 0,
        joined: int = 0,
    ) -> None:  # fmt: skip
        self._rows.append((
            nbytes, ns, version, self.within, 0, *accesses, adding_ns, first_end, _KIND[kind],
            self._names.setdefault(name, len(self._names)), *stream, *peer, thread, launches, 0, 0, adding, gradients,
            task, joined,
        ))  # fmt: skip

    def trace(self, steps: int) -> Trace:
        """All rows, and the same again for each further step: with versions, nodes, gradients and tasks of its own."""
        made = Trace(names=tuple(self._names))
        first = b"".join(ROW.pack(*row) for row in self._rows)
        rows = bytearray()
        for step in range(steps):
            rows += self._shifted(first, step)
            accesses = self._accesses[:]
            accesses[::3] = array("q", (number + step * self._nodes for number in accesses[::3]))
            made.accesses += accesses
        made.rows = (Row * (len(self._rows) * steps)).from_buffer(rows)
        made.launch_ends, made.tasks = self._ends, self._tasks * steps
        return made

    def _shifted(self, rows: bytes, step: int) -> bytes:
        """The rows of a later step."""
        columns = {
            "version": self._versions, "pass": self._versions, "gradients": self._gradients, "task": len(self._tasks),
        }  # fmt: skip
        places = len(self._accesses) // 3
        for letter, names in (
            ("q", ("version", "pass", "first_read", "first_write", "end_write")),
            ("i", ("gradients", "task")),
        ):
            words = array(letter, rows)
            for name in names if step else ():
                field = getattr(Row, name)
                column = slice(field.offset // field.size, None, ROW.size // field.size)
                if name in columns:
                    more = step * columns[name]
                    words[column] = array(letter, [number and number + more for number in words[column]])
                else:
                    words[column] = array(letter, [number + step * places for number in words[column]])
            rows = words.tobytes()
        return rows
