"""Recording lanes: the forward program written down as a shadow graph and what the host does, in order.

The counterpart of ``engine/paper/executor.py``, step by step: where the engine makes an autograd node, so do these
lanes, with the sequence number that it would have; where it makes none, neither do they.

The thread of the batch makes the nodes between tasks. If workers make those of tasks, each counts from zero, and the
thread of the batch from m n, so that its nodes outrank all checkpoints. Else one thread counts them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from gpipe_bench.components import Components
from gpipe_bench.simulator.workloads.workload import SkipWork, Workload
from tests.simulator.oracle.graph import Node
from tests.simulator.oracle.places import Places

__all__ = ["COLLECT", "COPY", "LAUNCH", "SYNC", "Action", "RecordingLanes"]

COPY, SYNC, LAUNCH, COLLECT = range(4)

_OLD: Final = 2**40
"""The first number of a thread that has made many nodes before."""


class Action(NamedTuple):
    """One thing that the calling thread does in the forward pass.

    Attributes:
        what: ``COPY``, ``LAUNCH`` and ``COLLECT`` have a node, ``SYNC`` streams.
        node: the copy or task.
        waiter: the stream that waits.
        awaited: the stream that it waits for.
    """

    what: int
    node: Node | None
    waiter: int = 0
    awaited: int = 0


class RecordingLanes:
    """Writes the steps of :mod:`gpipe_bench.schedules.program` down for one batch.

    Args:
        workload: sizes of what is copied, nodes per task.
        components: which components are on.
        places: devices and streams.
        workers: whether workers issue the tasks; else the calling thread does.
        published: as the flavour ``published`` of :mod:`tests.simulator.oracle.autograd` has it: no Join before a
            Copy, and a thread of the batch whose numbers are above all others.

    Attributes:
        actions: what the calling thread does, in order.
        running: the node of each task.
        portals: whether skips have portals.
    """

    def __init__(
        self,
        workload: Workload,
        components: Components,
        places: Places,
        *,
        workers: bool,
        published: bool = False,
    ) -> None:
        m, n = workload.m, workload.n
        self.actions: list[Action] = []
        self._work = workload
        self._places = places
        self._workers = workers
        self._published = published
        self.portals = components.portals
        self._sizes = {skip.key: skip.bytes for skip in workload.skips}
        self._incoming, self._outgoing = ([_keys(workload, j, way, components) for j in range(n)] for way in (0, 1))
        self._sources = {skip.key: skip.source for skip in workload.skips}
        self._unreturned = {skip.key for skip in workload.skips if not skip.returns}
        # Producers of the micro-batch and of each skip on its way; None is a tensor without a graph.
        self.values: list[Node | None] = [None] * m
        self._skips: list[dict[str, Node | None]] = [{} for _ in range(m)]
        # Forks whose phony Join (i+1, j) takes; and those whose phony still has to be taken on partition j.
        self._forks: dict[tuple[int, int], Node] = {}
        self._pending: list[Node | None] = [None] * m
        self.running: dict[tuple[int, int], Node] = {}
        # All nodes, with what a backward pass changes of each.
        self._nodes: list[Node] = []
        self._fresh: list[int] = []
        # Numbers taken by the thread of the batch, and by each worker.
        self._made = (_OLD if published else m * n) if workers else 0
        self._counters = [0] * n
        self._checkpointed = False

    # --- fence ---------------------------------------------------------------------------------------------------

    def join(self, i: int, j: int) -> None:
        """See :meth:`~gpipe_bench.schedules.program.Lanes.join`; if no input needs a gradient, it takes the phony."""
        phony, riding = self._forks.pop((i - 1, j), None), self._riding(j)
        taken = self._flat(i, riding)
        if phony is None or self._published or not any(taken):
            self._pending[i] = phony
            return
        stream = self._places.copying(i, j - 1) if j else self._places.computing[0]
        node = self._node("join", i, max(j - 1, 0), stream)
        node.take(taken, phony)
        self._put(i, node, riding)

    def portal(self, i: int, j: int, skip: str) -> None:
        """See :meth:`gpipe_bench.schedules.program.Lanes.portal`."""
        source = self._sources[skip]
        if self._places.moves(source, j):
            nbytes = (self._sizes[skip][self._work.microbatch_sizes[i]],)
            node = self._copy("portal", i, (source, j), nbytes)
            node.returned = () if skip in self._unreturned else nbytes
            taken = [self._skips[i][skip]]
            node.take(taken)
            node.skip = skip
            self._skips[i][skip] = _passed(node, taken)

    def copy(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.schedules.program.Lanes.copy`."""
        if not self._places.moves(j - 1, j):
            return
        riding = self._riding(j)
        size = self._work.microbatch_sizes[i]
        nbytes = (*self._work.task(i, j).input_bytes, *(self._sizes[key][size] for key in riding))
        node = self._copy("copy", i, (j - 1, j), nbytes)
        node.returned = self._returned(node, riding)
        taken = self._flat(i, riding)
        phony = None
        if any(taken):
            phony, self._pending[i] = self._pending[i], None
        node.take(taken, phony)
        self._put(i, _passed(node, taken), riding)

    # --- compute -------------------------------------------------------------------------------------------------

    def await_copy(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.schedules.program.Lanes.await_copy`."""
        self._wait(i, j, self._incoming[j], arriving=True)

    def launch(self, i: int, j: int, *, checkpoint: bool) -> None:
        """See :meth:`gpipe_bench.schedules.program.Lanes.launch`."""
        phony, self._pending[i] = self._pending[i], None
        self._checkpointed = self._checkpointed or checkpoint
        taken, learns = self._flat(i, self._incoming[j]), self._work.task(i, j).learns
        # Without checkpoint it is one node all the same, if others have one and there is nothing else to tie a Join to.
        tied = self._checkpointed and not any(taken) and not self._published
        single = learns and (checkpoint or tied)
        if phony is not None and (single or self._published):
            join = self._node("join", i, j, self._places.computing[j])
            join.take((), phony)
            taken.append(join)
        kind = "checkpoint" if checkpoint and learns else "task"
        node = self._node(kind, i, j, self._places.computing[j], rank=self._rank(i, j, single=single))
        node.single = single
        node.take(taken)
        for key in self._incoming[j]:
            del self._skips[i][key]
        self.running[i, j] = node
        self.actions.append(Action(LAUNCH, node))

    def collect(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.schedules.program.Lanes.collect`."""
        node = self.running[i, j]
        self._put(i, node if self._work.task(i, j).learns else None, self._outgoing[j])
        self.actions.append(Action(COLLECT, node))

    # --- leave ---------------------------------------------------------------------------------------------------

    def await_compute(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.schedules.program.Lanes.await_compute`."""
        self._wait(i, j, self._outgoing[j], arriving=False)

    def recompute(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.schedules.program.Lanes.recompute`."""
        if self.running[i, j].kind != "checkpoint":
            return
        node = self._node("recompute", i, j, self._leaving(i, j), self._places.computing[j])
        node.take(self._flat(i, self._outgoing[j]))
        node.partner = self.running[i, j]
        self._put(i, node, self._outgoing[j])

    def fork(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.schedules.program.Lanes.fork`; there is none where no gradient will ever pass."""
        if not self._work.task(i, j).learns:
            return
        node = self._node("fork", i, j, self._leaving(i, j))
        node.take(self._flat(i, self._outgoing[j]))
        self._put(i, node, self._outgoing[j])
        self._forks[i, j] = node

    def drain(self) -> None:
        """Nothing raises here, so nothing is left running."""

    # --- helpers -------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Remember the graph as it is, before a backward pass."""
        self._fresh = [node.waiting for node in self._nodes]

    def rewind(self) -> None:
        """The graph as :meth:`keep` found it: every step makes the same one."""
        for node, waiting in zip(self._nodes, self._fresh, strict=False):
            node.waiting, node.filled = waiting, False

    def root(self) -> Node:
        """The loss: the node at which the backward pass begins."""
        node = self._node("loss", 0, self._work.n - 1, self._places.computing[-1])
        node.take(self.values)
        return node

    def _riding(self, j: int) -> tuple[str, ...]:
        """Skips that travel to partition j in the tuple of their micro-batch."""
        return () if self.portals else self._incoming[j]

    def _flat(self, i: int, skips: Iterable[str]) -> list[Node | None]:
        return [self.values[i], *(self._skips[i][key] for key in skips)]

    def _put(self, i: int, node: Node | None, skips: Iterable[str]) -> None:
        self.values[i] = node
        self._skips[i].update(dict.fromkeys(skips, node))

    def _returned(self, node: Node, riding: Iterable[str]) -> tuple[int, ...]:
        """Sizes of the gradients that a copy moves back."""
        returns = self._work.task(node.i, node.j).returns
        if not returns and not self._unreturned:
            return node.nbytes
        tensors = len(node.nbytes) - len([*riding])
        there = (*(returns or (True,) * tensors), *(key not in self._unreturned for key in riding))
        return tuple(nbytes for nbytes, is_there in zip(node.nbytes, there, strict=True) if is_there)

    def _leaving(self, i: int, j: int) -> int:
        """The stream on which gradients of (i, j) arrive."""
        return self._places.copying(i, j) if j < self._work.n - 1 else self._places.computing[j]

    def _copy(self, kind: str, i: int, way: tuple[int, int], nbytes: tuple[int, ...]) -> Node:
        """The node of a copy from one partition to another; what it copies is yet to be taken."""
        source, target = way
        node = self._node(kind, i, target, self._places.copying(i, target), self._places.copying(i, source))
        node.source = source
        node.nbytes = nbytes
        self.actions.append(Action(COPY, node))
        return node

    def _wait(self, i: int, j: int, skips: tuple[str, ...], *, arriving: bool) -> None:
        copying, computing = self._places.copying(i, j), self._places.computing[j]
        if copying != computing:
            node = self._node("wait", i, j, copying, computing)
            # Of a wait, `peer` waits backward for `stream`, or the other way round; see `source`.
            node.source = j - 1 if arriving else j
            taken = self._flat(i, skips)
            node.take(taken)
            self._put(i, _passed(node, taken), skips)
            streams = (computing, copying) if arriving else (copying, computing)
            self.actions.append(Action(SYNC, node, *streams))

    def _node(
        self, kind: str, i: int, j: int, stream: int, peer: int | None = None, *, rank: int | None = None
    ) -> Node:
        other = stream if peer is None else peer
        node = Node(kind, (i, j), self._places.devices[j], stream=stream, peer=other)
        self._nodes.append(node)
        node.rank = self._take_numbers(1) if rank is None else rank
        return node

    def _take_numbers(self, count: int) -> int:
        """Number some nodes of the thread of the batch; gives the last number."""
        self._made += count
        return self._made - 1

    def _rank(self, i: int, j: int, *, single: bool) -> int:
        """The number of a task's node; of several, which run as one piece here, that in the middle."""
        count = 1 if single else self._work.task(i, j).nodes
        if not self._workers:
            return self._take_numbers(count) - count // 2
        worker = self._places.workers[j]
        self._counters[worker] += count
        return self._counters[worker] - 1 - count // 2


def _passed(node: Node, taken: Iterable[Node | None]) -> Node | None:
    """What the outputs of a node come from: of tensors without a graph it makes others without one."""
    return node if any(producer is not None for producer in taken) else None


def _keys(workload: Workload, j: int, outgoing: int, components: Components) -> tuple[str, ...]:
    """Skips that a task of partition j takes in (0) or gives out (1), as :func:`gpipe_bench.engine.partition.place`."""

    def concerns(skip: SkipWork) -> bool:
        if components.portals:
            return (skip.source if outgoing else skip.target) == j != (skip.target if outgoing else skip.source)
        before = j if outgoing else j - 1
        return skip.source <= before < skip.target

    return tuple(skip.key for skip in workload.skips if concerns(skip))
