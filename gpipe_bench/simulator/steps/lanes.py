"""The paper's forward program on lanes that write rows, and the backward pass that autograd makes of it.

The counterpart of engine/paper/executor.py, step by step: where the engine makes an autograd node, so do these lanes,
with the sequence number that it would have; where it makes none, neither do they.

    x - Join - Copy - Wait - Checkpoint - Wait - Recompute - Fork - y      as in docs/engine.md, "The autograd graph"

The calling thread makes the nodes between tasks. If workers make those of tasks, each counts from zero, and the
calling thread from m n, so that its nodes outrank all checkpoints. Else one thread counts them all.

Which node a thread runs next the machine decides, as autograd does: the deepest first, then the highest number. Rows
say what a node does:

    current     a node is on the device of its outputs (pytorch#135633); a nested backward pass stays on its device's
                thread and comes first, so a checkpoint runs as one piece; for every gradient the stream of the node
                that takes it waits for the stream of the node that gave it (pytorch#151079)
    published   PyTorch 1.3, as torchgpipe used it: the root of a nested backward pass goes to the thread of the CPU,
                which sleeps. Until it comes back the device's thread runs whatever else is ready; if that is a
                checkpoint, it nests again: how many do is a race. A pass nested deeper comes first, and one that is
                not the innermost cannot return, so checkpoints end last in, first out, and their copies wait. Only
                Wait and copies order streams. There is no Join before a Copy: the Copy itself releases the Fork
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from gpipe_bench.simulator.steps.issue import CHECKPOINT, OPEN, TIED, Issuer
from gpipe_bench.simulator.steps.writer import CALLER, Stream

_MANY_NODES: Final = 1 << 40
"""The first number of a thread that has made many nodes before."""

NodeKind = Literal["join", "copy", "portal", "wait", "task", "checkpoint", "recompute", "fork", "loss"]


@dataclass(slots=True, eq=False)
class Node:
    """A function of autograd.

    Attributes:
        kind: what it does.
        i: micro-batch.
        j: partition, of a copy that where it arrives.
        stream: where its backward is issued.
        rank: its sequence number.
        takes: nodes whose outputs it takes, which receive its gradients.
        lane: the Fork whose phony it takes besides: it waits for this node, and no stream does.
        skip: of a portal.
        arriving: whether a wait comes before its task.
    """

    kind: NodeKind
    i: int
    j: int
    stream: Stream
    rank: int
    takes: list[Node] = field(default_factory=list)
    lane: Node | None = None
    skip: int | None = None
    arriving: bool = False


class TraceLanes:
    """Lanes of :mod:`gpipe_bench.schedules.program`: a step is rows of a host thread, and a node of the graph.

    Args:
        issuer: writes the rows.
        workers: whether workers issue the tasks; else the calling thread does.

    Attributes:
        nodes: of the graph, in the order in which they were made.
    """

    def __init__(self, issuer: Issuer, *, workers: bool) -> None:
        self._issuer, self._work, self._layout = issuer, issuer.work, issuer.layout
        m, n = self._work.m, self._work.n
        self._workers = workers
        self._first_rank = (_MANY_NODES if issuer.published else m * n) if workers else 0
        self._made = 0
        self._made_by_worker = [0] * n
        self.nodes: list[Node] = []
        self._carried: list[dict[int | None, Node]] = [{} for _ in range(m)]
        self._pending: list[Node | None] = [None] * m
        self._forks: list[Node | None] = [None] * n
        self._tasks: dict[tuple[int, int], Node] = {}
        self._issued: dict[tuple[int, int], int] = {}
        self._any_checkpoint = False

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _node(self, kind: NodeKind, i: int, j: int, stream: Stream) -> Node:
        made = Node(kind, i, j, stream, self._first_rank + self._made)
        self._made += 1
        self.nodes.append(made)
        return made

    def _producers(self, i: int, skips: Sequence[int]) -> list[Node]:
        """Of a micro-batch and some skips, each once."""
        carried = self._carried[i]
        return [*dict.fromkeys([carried[name] for name in (None, *skips) if name in carried])]

    def _put(self, i: int, node: Node | None, skips: Sequence[int]) -> None:
        """A micro-batch and some skips come from a node now, or from none that gradients pass."""
        for name in (None, *skips):
            if node is None:
                self._carried[i].pop(name, None)
            else:
                self._carried[i][name] = node

    def _through(
        self, kind: NodeKind, i: int, j: int, stream: Stream, *, skips: Sequence[int], lane: Node | None = None
    ) -> Node:
        """A node through which a micro-batch and some skips go, if they have a graph, and the phony of a Fork."""
        made = self._node(kind, i, j, stream)
        made.takes, made.lane = self._producers(i, skips), lane
        self._put(i, made if made.takes else None, skips)
        return made

    # --- steps of the program -----------------------------------------------------------------------------------------

    def join(self, i: int, j: int) -> None:
        """Of inputs that need no gradient, the task takes the phony. In PyTorch 1.3 the Copy does: there is no Join."""
        phony, self._forks[j] = self._forks[j], None
        riding = self._issuer.riding[j]
        if phony is None or self._issuer.published or not self._producers(i, riding):
            self._pending[i] = phony
            return
        stream = self._layout.copying[j - 1][i] if j else self._layout.computing[0]
        self._through("join", i, max(j - 1, 0), stream, skips=riding, lane=phony)

    def portal(self, i: int, j: int, skip: int) -> None:
        """Move a skip tensor, unless it is there: then its gradient alone moves."""
        one = self._work.skips[skip]
        if not self._layout.moves(one.source, j):
            return
        made = self._node("portal", i, j, self._layout.copying[j][i])
        made.skip = skip
        if one.holder is None:
            self._issuer.transfer(CALLER, i, j, skip)
        if skip in self._carried[i]:
            made.takes = [self._carried[i][skip]]
            self._carried[i][skip] = made

    def copy(self, i: int, j: int) -> None:
        """Move a micro-batch."""
        if not self._layout.moves(j - 1, j):
            return
        riding, lane = self._issuer.riding[j], None
        if self._producers(i, riding):
            lane, self._pending[i] = self._pending[i], None
        self._through("copy", i, j, self._layout.copying[j][i], skips=riding, lane=lane)
        self._issuer.transfer(CALLER, i, j)

    def await_copy(self, i: int, j: int) -> None:
        """Before a task: its compute stream waits for the copy stream that brought its inputs."""
        self._wait(i, j, self._issuer.incoming[j], arriving=True)

    def await_compute(self, i: int, j: int) -> None:
        """After a task: the copy stream that takes its outputs away waits for its compute stream."""
        self._wait(i, j, self._issuer.outgoing[j], arriving=False)

    def _wait(self, i: int, j: int, skips: Sequence[int], *, arriving: bool) -> None:
        copying, computing = self._layout.copying[j][i], self._layout.computing[j]
        if copying == computing:
            return
        made = self._through("wait", i, j, copying, skips=skips)
        made.arriving = arriving
        waiter, awaited = (computing, copying) if arriving else (copying, computing)
        self._issuer.writer.order(CALLER, waiter, awaited)

    def launch(self, i: int, j: int, *, checkpoint: bool) -> None:
        """Without a checkpoint a task is one node all the same, if others of its batch have one."""
        phony, self._pending[i] = self._pending[i], None
        learns, published = self._work.task(i, j).learns, self._issuer.published
        self._any_checkpoint |= checkpoint
        single = learns and (checkpoint or (self._any_checkpoint and not published))
        stream, join = self._layout.computing[j], None
        if phony is not None and (single or published):
            join = self._node("join", i, j, stream)
            join.lane = phony
        rank = self._task_rank(i, j, single=single, checkpoint=checkpoint)
        made = Node("checkpoint" if checkpoint and learns else "task", i, j, stream, rank)
        made.takes = self._producers(i, self._issuer.incoming[j]) + ([] if join is None else [join])
        self.nodes.append(made)
        self._tasks[i, j] = made
        how = CHECKPOINT if made.kind == "checkpoint" else TIED if single else OPEN
        if not self._workers:
            self._issuer.run(CALLER, "forward", i, j, how)
            return
        worker = 1 + self._layout.workers[j]
        go = self._issuer.writer.signal(CALLER)
        self._issuer.writer.awaits(worker, go)
        self._issuer.run(worker, "forward", i, j, how)
        self._issued[i, j] = self._issuer.writer.signal(worker)

    def _task_rank(self, i: int, j: int, *, single: bool, checkpoint: bool) -> int:
        """The number of a task's node.

        Of several, which run as one piece here, it is that in the middle. One node that keeps its activations comes
        before all that are made inside of it.
        """
        count = single + (0 if checkpoint else self._work.task(i, j).nodes)
        if self._workers:
            first = self._made_by_worker[self._layout.workers[j]]
            self._made_by_worker[self._layout.workers[j]] += count
        else:
            first, self._made = self._made, self._made + count
        return first if single else first + count - 1 - count // 2

    def collect(self, i: int, j: int) -> None:
        """Take the result of a task."""
        if (i, j) in self._issued:
            self._issuer.writer.awaits(CALLER, self._issued.pop((i, j)))
        self._issuer.tell(CALLER, "collect", i, j)
        self._put(i, self._tasks[i, j] if self._work.task(i, j).learns else None, self._issuer.outgoing[j])

    def recompute(self, i: int, j: int) -> None:
        """Only what has a checkpoint is recomputed."""
        if self._tasks[i, j].kind == "checkpoint":
            self._through("recompute", i, j, self._layout.leaving(i, j), skips=self._issuer.outgoing[j])

    def fork(self, i: int, j: int) -> None:
        """There is none where no gradient will ever pass."""
        if self._work.task(i, j).learns:
            self._forks[j] = self._through("fork", i, j, self._layout.leaving(i, j), skips=self._issuer.outgoing[j])

    def drain(self) -> None:
        """Nothing fails here."""

    # --- the backward pass --------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """Write the nodes that gradients pass, each on the thread of its device; consumers come before producers."""
        writer, last = self._issuer.writer, self._work.n - 1
        loss = self._node("loss", 0, last, self._layout.computing[last])
        loss.takes = [node for i in range(self._work.m) for node in self._producers(i, ())]
        numbers = {node: number for number, node in enumerate(self.nodes, 1)}
        passed, filled = {loss}, set[tuple[int, int]]()
        self._issuer.tell(CALLER, "loss")
        begun = writer.version()
        writer.plain("backward", CALLER, begun)
        writer.within = begun
        for node in reversed(self.nodes):
            if node not in passed:
                continue
            receivers = node.takes if node.lane is None else [*node.takes, node.lane]
            passed.update(receivers)
            thread = 1 + self._work.n + self._layout.backward[node.j]
            waits_for = [numbers[each] for each in receivers]
            nests = node.kind == "checkpoint" and self._issuer.published
            writer.node("node", thread, node.rank, own=numbers[node], waits_for=() if nests else waits_for)
            if node.kind == "recompute":
                filled.add((node.i, node.j))
            elif node.kind == "checkpoint" and (node.i, node.j) not in filled:
                self._issuer.run(thread, "recompute", node.i, node.j)
            if nests:
                self._nest(thread, node, waits_for, numbers[node])
            else:
                self._run(thread, node)
            if not self._issuer.published:
                for each in node.takes:
                    writer.order(thread, each.stream, node.stream)
        writer.within = 0
        writer.plain("backward_end", CALLER, begun)

    def _run(self, thread: int, node: Node) -> None:
        if node.kind in ("task", "checkpoint"):
            self._issuer.run(thread, "backward", node.i, node.j)
        elif node.kind == "recompute":
            self._issuer.run(thread, "recompute", node.i, node.j)
        elif node.kind in ("copy", "portal"):
            self._issuer.transfer(thread, node.i, node.j, node.skip, back=True)
        elif node.kind == "loss":
            self._issuer.loss(thread)
        elif node.kind == "wait" and self._issuer.published:
            computing = self._layout.computing[node.j]
            waiter, awaited = (node.stream, computing) if node.arriving else (computing, node.stream)
            self._issuer.writer.order(thread, waiter, awaited)

    def _nest(self, thread: int, node: Node, waits_for: Sequence[int], number: int) -> None:
        """The backward pass of a checkpoint as PyTorch 1.3 runs it: nested, with its root on the thread of the CPU."""
        writer = self._issuer.writer
        writer.busy(thread, self._issuer.settings.nesting_ns[0])
        nested = writer.version()
        writer.plain("nest", thread, nested)
        writer.node("root", thread, node.rank, own=number, version=nested)
        self._issuer.run(thread, "backward", node.i, node.j)
        writer.node("return", thread, node.rank, own=number, waits_for=waits_for, version=nested)
