"""B cut into I, the gradients of the inputs, and W, those of the weights (Zero Bubble, arXiv 2401.10241, section 2).

    output ─► Linear 2 ─► Tanh ─► Linear 1 ─► input          I runs this way, and notes what arrives at each node
                 │                   │                       from which weights branch off. W begins at these nodes
              weight 2            weight 1                   and runs into the branches alone.

W keeps the noted gradients, and the tensors that its first nodes have saved. For a Linear this is the input, without
which there is no gradient of the weight. All other nodes stay, too, because a node holds those that it leads to, but
their saved tensors are freed when I has ended.

Only documented autograd is used: ``Node.next_functions``, ``Node.register_prehook``, ``GradientEdge``,
``backward(inputs=)`` and hooks of saved tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from gpipe_bench.engine.runtime.saved import Packed, pack_saved

Grads = tuple[Tensor | None, ...]

# Before PyTorch 2.13 a node of a custom function dies with its graph, even if Python still refers to it.
_NODES_STAY: Final = torch.__version__ >= "2.13"


class WeightsLater:
    """What W has to do: ``branches`` are the nodes on the way to the inputs, with the weights that branch off there.

    ``ends`` are edges and gradients that do not lead to the inputs at all. ``graph`` keeps the nodes alive where
    nothing else does. ``packed`` are the saved tensors of all other nodes.
    """

    def __init__(self, branches: dict[Node, list[Tensor]], ends: list[tuple[GradientEdge, Tensor]]) -> None:
        self._branches, self._ends = branches, ends
        self._arrived: dict[Node, Grads] = {}
        self.graph: Sequence[GradientEdge] = ()
        self.packed: Sequence[Packed] = ()

    def note(self, node: Node, grads: Grads) -> None:
        """Called by autograd when the gradients of a node have arrived."""
        self._arrived[node] = grads

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
        for node, grads in self._arrived.items():
            there = [(GradientEdge(node, index), grad) for index, grad in enumerate(grads) if grad is not None]
            if there:
                # Hooks of the tensor run again, on gradients that they have changed already.
                handle = node.register_prehook(partial(_instead, grads))
                edges, theirs = zip(*there, strict=True)
                torch.autograd.backward(edges, theirs, inputs=self._branches[node])
                handle.remove()
        self._arrived.clear()
        self.graph = ()


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
    reaches = reaching([edge.node for edge in edges], end)
    ends = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if not reaches[edge.node]]
    branches = branching(reaches, end, [edge.node for edge, _ in ends])
    if branches is None:
        return None
    later = WeightsLater(branches, ends)
    if not _NODES_STAY and any(isinstance(node, BackwardCFunction) for node in branches):
        later.graph = edges
    through = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if reaches[edge.node]]
    if not through:
        return (None,) * len(inputs), later
    between = [node for node, leads in reaches.items() if leads and node is not end and node not in branches]
    later.packed = pack_saved(between)
    roots, theirs = zip(*through, strict=True)
    handles = [node.register_prehook(partial(later.note, node)) for node in branches]
    try:
        found = torch.autograd.grad(roots, list(inputs), theirs, retain_graph=True, allow_unused=True)
    finally:
        # Python does not see through nodes: their hooks, which know the nodes, would keep them for ever.
        for handle in handles:
            handle.remove()
    return found, later


def _instead(grads: Grads, _: Grads) -> Grads:
    return grads


def reaching(roots: Sequence[Node], end: Node) -> dict[Node, bool]:
    """For each node behind ``roots``, in the order in which all behind it come first: whether it leads to ``end``."""
    reaches: dict[Node, bool] = {end: True}
    seen: set[Node] = {end}
    todo: list[tuple[Node, Any]] = []
    for root in roots:
        if root not in seen:
            seen.add(root)
            todo.append((root, iter(root.next_functions)))
        while todo:
            node, rest = todo[-1]
            for child, _ in rest:
                if child is not None and child not in seen:
                    seen.add(child)
                    todo.append((child, iter(child.next_functions)))
                    break
            else:
                todo.pop()
                reaches[node] = any(reaches.get(child, False) for child, _ in node.next_functions if child is not None)
    return reaches


def branching(reaches: dict[Node, bool], end: Node, ends: Sequence[Node]) -> dict[Node, list[Tensor]] | None:
    """For nodes that lead to ``end`` the weights that branch off there; None if branches, or one and ``ends``, meet."""
    branches: dict[Node, list[Tensor]] = {}
    taken = _behind(ends)
    for node, leads in reaches.items():
        if not leads or node is end:
            continue
        own = _behind([child for child, _ in node.next_functions if child is not None and not reaches[child]])
        if not taken.isdisjoint(own):
            return None
        taken |= own
        leaves = [each for each in own if type(each).__name__ == "AccumulateGrad"]
        weights = [leaf.variable for leaf in leaves]  # type: ignore[attr-defined]  # documented, but not annotated
        if weights:
            branches[node] = weights
    return branches


def _behind(nodes: Sequence[Node]) -> set[Node]:
    """These nodes and all that they lead to."""
    found: set[Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [child for child, _ in node.next_functions if child is not None]
    return found
