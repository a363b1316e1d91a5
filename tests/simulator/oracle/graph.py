"""The shadow of an autograd graph: one node per autograd function that the engine would make.

    x ─ Join ─ Copy ─ Wait ─ Checkpoint ─ Wait ─ Recompute ─ Fork ─ y      as in docs/engine.md, "The autograd graph"

A task without checkpoint is one node, although it makes many: their numbers are consecutive, and its rank is that of
the one in the middle. Edges point the way gradients go.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Node"]


class Node:
    """An autograd function.

    Attributes:
        kind: ``copy``, ``portal``, ``wait``, ``checkpoint``, ``task``, ``join``, ``recompute``, ``fork``, ``loss``.
        i: micro-batch.
        j: partition; where a copy arrives.
        device: whose autograd thread runs it.
        stream: on which its backward is issued; for a copy also ``peer``'s.
        peer: the other stream of a copy or wait; the compute stream of a checkpoint, task or recomputation.
        source: partition where a copy begins.
        skip: the skip that a portal moves.
        nbytes: sizes of the tensors that a copy moves.
        returned: of those for which gradients are moved back.
        rank: its sequence number: among ready nodes of one thread the highest goes first.
        next: nodes that receive its gradients.
        lane: the Fork that only waits for it, if any.
        waiting: edges into it that no gradient has passed yet.
        filled: whether a checkpoint's slot holds a recomputation.
        single: whether a task is one node of the engine, which keeps what it took and what comes until it has run.
        partner: of a recomputation, its checkpoint.
    """

    __slots__ = (
        "device",
        "filled",
        "i",
        "j",
        "kind",
        "lane",
        "nbytes",
        "next",
        "partner",
        "peer",
        "rank",
        "returned",
        "single",
        "skip",
        "source",
        "stream",
        "waiting",
    )

    def __init__(self, kind: str, task: tuple[int, int], device: int, *, stream: int, peer: int) -> None:
        self.kind = kind
        self.i, self.j = task
        self.device = device
        self.stream = stream
        self.peer = peer
        self.source = self.j
        self.skip: str | None = None
        self.nbytes: tuple[int, ...] = ()
        self.returned: tuple[int, ...] = ()
        self.rank = 0
        self.next: list[Node] = []
        self.lane: Node | None = None
        self.waiting = 0
        self.filled = False
        self.single = kind == "checkpoint"
        self.partner: Node | None = None

    def take(self, producers: Iterable[Node | None], lane: Node | None = None) -> None:
        """Make this node a consumer of ``producers``; None is a tensor without a graph.

        Args:
            producers: nodes that gave the tensors, with repetitions.
            lane: the Fork whose phony this node takes.
        """
        for producer in producers:
            if producer is not None and producer not in self.next:
                self.next.append(producer)
                producer.waiting += 1
        if lane is not None:
            self.lane = lane
            lane.waiting += 1
