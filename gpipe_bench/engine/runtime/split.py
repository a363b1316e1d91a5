"""B cut into I, the gradients of the inputs, and W, those of the weights (Zero Bubble, arXiv 2401.10241, section 2).

    output ─► Linear 2 ─► Tanh ─► Linear 1 ─► input          I runs this way, and notes what arrives at each node
                 │                   │                       from which weights branch off. W begins at these nodes
              weight 2            weight 1                   and runs into the branches alone: level by level, since a
               level 1             level 0                   call of autograd must not go from one node to the next.

W keeps the noted gradients, and the tensors that its first nodes have saved. For a Linear this is the input, without
which there is no gradient of the weight. All other nodes stay, too, because a node holds those that it leads to, but
their saved tensors are freed when I has ended.

Only documented autograd is used: ``Node.next_functions``, ``Node.register_prehook``, ``GradientEdge``,
``backward(inputs=)`` and hooks of saved tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from gpipe_bench.engine.runtime.saved import Packed, pack_saved

Grads = tuple[Tensor | None, ...]

# Before PyTorch 2.13 a node of a custom function dies with its graph, even if Python still refers to it.
_NODES_STAY: Final = torch.__version__ >= "2.13"


class Branch:
    """A node on the way to the inputs, from which weights branch off: a hook before it, which notes what arrives in I.

    The node refers to its hook, so the hook must not refer to the node: Python does not see through nodes.

    Attributes:
        weights: those that branch off.
        grads: the gradients that have arrived; None before I, and after W.
    """

    __slots__ = ("grads", "weights")

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = weights
        self.grads: Grads | None = None

    def __call__(self, grads: Grads) -> Grads:
        """In W hooks of the tensor have run again, on gradients that they had changed already: those of I count."""
        if self.grads is None:
            self.grads = grads
        return self.grads


Levels = list[dict[Node, Branch]]
"""Nodes from which weights branch off. One call of autograd runs a level, as its nodes do not lead to one another."""


class WeightsLater:
    """What W has to do. The last of ``levels`` comes first, as in I.

    ``ends`` are edges and gradients that do not lead to the inputs at all. ``graph`` keeps the nodes alive where
    nothing else does. ``packed`` are the saved tensors of all other nodes.
    """

    def __init__(self, levels: Levels, ends: list[tuple[GradientEdge, Tensor]]) -> None:
        self._levels, self._ends = levels, ends
        self.graph: Sequence[GradientEdge] = ()
        self.packed: Sequence[Packed] = ()

    def free_saved(self) -> None:
        """Free the saved tensors that W does not need."""
        for saved in self.packed:
            saved.free()
        self.packed = ()

    def run(self) -> None:
        """Compute the gradients of the weights."""
        if self._ends:
            torch.autograd.backward([edge for edge, _ in self._ends], [grad for _, grad in self._ends])
            self._ends = []
        for level in reversed(self._levels):
            _run_level(level)
        for level in reversed(self._levels):
            for branch in level.values():
                branch.grads = None
        self._levels = []
        self.graph = ()


def _run_level(level: dict[Node, Branch]) -> None:
    """Compute the gradients of the weights of one level."""
    edges, grads, weights = [], [], []
    for node, branch in level.items():
        for index, grad in enumerate(branch.grads or ()):
            if grad is not None:
                edges.append(GradientEdge(node, index))
                grads.append(grad)
        weights += branch.weights
    if edges:
        torch.autograd.backward(edges, grads, inputs=weights)


def backward_inputs(
    edges: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[GradientEdge]
) -> tuple[Grads, WeightsLater] | None:
    """I: the gradients of ``inputs``, and what W has to do.

    Args:
        edges: where the backward pass begins.
        grads: a gradient for each.
        inputs: edges of the inputs, all of one node.

    Returns:
        None, without having done anything, where weights cannot be told apart: one that is used twice, or what is
        computed from it.
    """
    end = inputs[0].node
    cut = find_branches([edge.node for edge in edges], end)
    if cut is None:
        return None
    leading, levels = cut
    pairs = list(zip(edges, grads, strict=True))
    later = WeightsLater(levels, [(edge, grad) for edge, grad in pairs if edge.node not in leading])
    branches = {node: branch for level in levels for node, branch in level.items()}
    if not _NODES_STAY and any(isinstance(node, BackwardCFunction) for node in branches):
        later.graph = edges
    through = [(edge, grad) for edge, grad in pairs if edge.node in leading]
    if not through:
        return (None,) * len(inputs), later
    later.packed = pack_saved([node for node in leading if node is not end and node not in branches])
    for node, branch in branches.items():
        node.register_prehook(branch)
    roots, theirs = zip(*through, strict=True)
    return torch.autograd.grad(roots, list(inputs), theirs, retain_graph=True, allow_unused=True), later


def find_branches(roots: Sequence[Node], end: Node) -> tuple[Collection[Node], Levels] | None:
    """The nodes that lead from ``roots`` to ``end``, and those among them from which weights branch off.

    A node is in level k if at most k such nodes are on a way from there to the end.

    Returns:
        None if branches meet, or a branch and what is behind a root that does not lead to ``end``.
    """
    # How many nodes of levels are on the way, the node itself included.
    depths: dict[Node, int] = {end: 0}
    levels: Levels = []
    taken: set[Node] = set()
    following: dict[Node, list[Node]] = {end: []}
    todo = list(roots)
    while todo:
        node = todo[-1]
        if node not in following:
            following[node] = nodes = [each for each, _ in node.next_functions if each is not None]
            todo += [each for each in nodes if each not in following]
            continue
        # What follows has been here.
        todo.pop()
        nodes = following[node]
        on_the_way = [depths[each] for each in nodes if each in depths]
        if not on_the_way or node in depths:
            continue
        depth = max(on_the_way)
        if len(on_the_way) < len(nodes):
            own = _behind([each for each in nodes if each not in depths], following)
            if not taken.isdisjoint(own):
                return None
            taken |= own
            leaves = [each for each in own if type(each).__name__ == "AccumulateGrad"]
            if leaves:
                if depth == len(levels):
                    levels.append({})
                # documented, but not annotated
                levels[depth][node] = Branch([leaf.variable for leaf in leaves])  # type: ignore[attr-defined]
                depth += 1
        depths[node] = depth
    elsewhere = _behind([root for root in roots if root not in depths], following)
    return (depths, levels) if taken.isdisjoint(elsewhere) else None


def _behind(nodes: Sequence[Node], following: dict[Node, list[Node]]) -> set[Node]:
    """These nodes and all that they lead to."""
    found: set[Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += following[node]
    return found
