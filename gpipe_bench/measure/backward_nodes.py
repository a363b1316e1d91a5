"""Whose an autograd node is: needed where a backward pass is many nodes that mix with those of other tasks.

Without checkpointing the engine can say where the backward pass of (i, j) begins; its end comes piece by piece, and
on the CPU one thread runs the nodes of several tasks in turn. But the graph is there. Everything reachable from the
node where the backward pass of a partition begins belongs to that partition or to an earlier one, so a node belongs
to the earliest partition from whose beginnings it can be reached:

    begin(i,1) ─► node ─► node ─► begin(i,0) ─► node ─► node
                     1       1              0       0       0      all walks made before these nodes run
"""

from __future__ import annotations

import torch
from torch.autograd.graph import Node

# The only way to ask it; PyTorch's own anomaly and module trackers do the same.
_current_node = torch._C._current_autograd_node  # noqa: SLF001 - the node that runs is known nowhere else


class BackwardNodes:
    """Owners of the autograd nodes of one thread's backward pass."""

    def __init__(self) -> None:
        # Nodes are held, since their Python objects are found again only while somebody does. What they saved is
        # freed all the same, when they have run.
        self._owners: dict[Node, int] = {}

    def begin(self, owner: int) -> None:
        """The backward pass of ``owner`` begins at the node that this thread runs now, if it runs one.

        A walk stops where an earlier one gave nodes to this partition or one before it, so a backward pass costs one
        visit per node and partition at most.
        """
        root: Node | None = _current_node()
        ahead = [] if root is None else [root]
        while ahead:
            node = ahead.pop()
            if self._owners.get(node, owner + 1) > owner:
                self._owners[node] = owner
                # Those without successors accumulate gradients of parameters: several tasks share them.
                ahead += [child for child, _ in node.next_functions if child is not None and child.next_functions]

    def current(self) -> int | None:
        """Owner of the node that this thread runs now; None when it is unknown or there is no node."""
        node: Node | None = _current_node()
        if node is None:
            self.clear()  # the backward pass is over
            return None
        return self._owners.get(node)

    def clear(self) -> None:
        """Forget, and let go of, every node."""
        self._owners.clear()
