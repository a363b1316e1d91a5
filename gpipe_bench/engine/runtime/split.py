"""B cut into I, the gradients of the inputs, and W, those of the weights (Zero Bubble, arXiv 2401.10241, section 2).

    output ─► Linear 2 ─► Tanh ─► Linear 1 ─► input          I runs this way, and notes what arrives at each node
                 │                   │                       from which weights branch off. W begins at these nodes
              weight 2            weight 1                   and runs into the branches alone.

W keeps the noted gradients, and the tensors that its first nodes have saved. For a Linear this is the input, without
which there is no gradient of the weight. All other nodes stay, too, because a node holds those that it leads to, but
their saved tensors are freed when I has ended.

A call of autograd walks over all nodes that its roots lead to. If it began at the nodes of I for each branch, the time
of W would grow with the square of the number of layers. So W calls these nodes itself, as ``node(*grads)``, and lets
autograd begin behind them. A node computes only those gradients that the running task of autograd needs. So W runs
within a task that needs the gradients of the branches.

A comment in PyTorch's C++ header of nodes says so (at ``task_should_compute_output``). If a node computed more, W would
be slower, not wrong. ``hooks_dict_ref`` and the engine's ``run_backward`` are not documented either. All else is:
``Node.next_functions``, ``Node.register_hook``, ``GradientEdge``, ``backward(inputs=)`` and hooks of saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gpipe_bench.engine.runtime.saved import Packed, pack_saved

Grads = tuple[Tensor | None, ...]

# Before PyTorch 2.13 a node of a custom function dies with its graph, even if Python still refers to it.
_NODES_STAY: Final = torch.__version__ >= "2.13"


class Branch:
    """A node on the way to the inputs, from which weights branch off: a hook after it, which notes what arrived in I.

    The node refers to its hook, so the hook must not refer to the node: Python does not see through nodes.

    Attributes:
        edges: those that lead to the weights, by their places among the edges of the node.
        weights: those that branch off.
        grads: the gradients that have arrived; none before I, and after W.
    """

    __slots__ = ("_hooks", "edges", "grads", "weights")

    def __init__(self, edges: dict[int, GradientEdge], weights: list[Tensor]) -> None:
        self.edges, self.weights = edges, weights
        self.grads: Grads = ()
        self._hooks: Callable[[], Any]

    def __call__(self, _: Grads, grads: Grads) -> None:
        """Note what has arrived."""
        self.grads = grads

    def watch(self, node: Node) -> None:
        """Be called after the node."""
        self._hooks = node.register_hook(self).hooks_dict_ref

    def run(self, node: Node) -> None:
        """Compute the gradients of the weights."""
        if all(grad is None for grad in self.grads):
            return
        if isinstance(node, BackwardCFunction) or len(self._hooks()) > 1 or torch.is_anomaly_enabled():
            self._run_by_autograd(node)
            return
        found = node(*self.grads)  # type: ignore[operator]  # not annotated
        for saved in pack_saved([node]):
            saved.free()
        pairs = [(_root(edge), found[place]) for place, edge in self.edges.items() if found[place] is not None]
        if pairs:
            # The engine sums a gradient up to the shape of its weight. torch.autograd.backward would refuse it before.
            engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - it has no public name
            roots, grads = zip(*pairs, strict=True)
            engine.run_backward(roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)

    def _run_by_autograd(self, node: Node) -> None:
        """The same with all that autograd does around a node, and with the walk.

        For custom functions, which cannot be called, for nodes that have a user's hook, and for ``detect_anomaly``.
        """
        grads = self.grads
        roots = [GradientEdge(node, index) for index, grad in enumerate(grads) if grad is not None]
        # Hooks of the tensor run again, on gradients that they have changed already: those of I count.
        with node.register_prehook(lambda _: grads):
            torch.autograd.backward(roots, [grad for grad in grads if grad is not None], inputs=self.weights)


def _root(edge: GradientEdge) -> GradientEdge | Tensor:
    """Where autograd begins: at a view of a weight without a gradient.

    A weight takes its first gradient over from the node before it, but copies one that comes from a caller of autograd.
    """
    weight = _weight(edge.node)
    if weight is None or weight.grad is not None or weight.layout is not torch.strided:
        return edge
    with torch.enable_grad():
        return weight.view_as(weight)


def _weight(node: Node) -> Tensor | None:
    """The weight whose gradient the node accumulates, if it does."""
    # documented, but not annotated
    return node.variable if type(node).__name__ == "AccumulateGrad" else None  # type: ignore[attr-defined]


class WeightsLater:
    """What W has to do. The last of ``branches`` comes first, as in I.

    ``ends`` are edges and gradients that do not lead to the inputs at all. ``graph`` keeps the nodes alive where
    nothing else does. ``packed`` are the saved tensors of all other nodes.
    """

    def __init__(self, branches: dict[Node, Branch], ends: list[tuple[GradientEdge, Tensor]]) -> None:
        self._branches, self._ends = branches, ends
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
        if self._branches:
            needed = [edge for branch in self._branches.values() for edge in branch.edges.values()]
            leaf = torch.empty(0, requires_grad=True)
            leaf.register_hook(lambda _: self._run_branches())  # type: ignore[no-untyped-call]
            torch.autograd.grad(leaf, [get_gradient_edge(leaf), *needed], leaf.detach(), allow_unused=True)
        self.graph = ()

    def _run_branches(self) -> None:
        """Run all within a task of autograd that needs the gradients of their edges."""
        done = []
        while self._branches:
            node, branch = self._branches.popitem()
            branch.run(node)
            done.append(branch)
        for branch in done:
            branch.grads = ()


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
    leading, branches = cut
    pairs = list(zip(edges, grads, strict=True))
    later = WeightsLater(branches, [(edge, grad) for edge, grad in pairs if edge.node not in leading])
    if not _NODES_STAY and any(isinstance(node, BackwardCFunction) for node in branches):
        later.graph = edges
    through = [(edge, grad) for edge, grad in pairs if edge.node in leading]
    if not through:
        return (None,) * len(inputs), later
    later.packed = pack_saved([node for node in leading if node is not end and node not in branches])
    for node, branch in branches.items():
        branch.watch(node)
    roots, theirs = zip(*through, strict=True)
    return torch.autograd.grad(roots, list(inputs), theirs, retain_graph=True, allow_unused=True), later


def find_branches(roots: Sequence[Node], end: Node) -> tuple[Collection[Node], dict[Node, Branch]] | None:
    """The nodes that lead from ``roots`` to ``end``, and those among them from which weights branch off.

    A node comes after those that it leads to.

    Returns:
        None if branches meet, or a branch and what is behind a root that does not lead to ``end``.
    """
    leading: set[Node] = {end}
    branches: dict[Node, Branch] = {}
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
        aside = [each for each in following[node] if each not in leading]
        if len(aside) == len(following[node]) or node in leading:
            continue
        leading.add(node)
        if aside:
            own = _behind(aside, following)
            if not taken.isdisjoint(own):
                return None
            taken |= own
            weights = [weight for each in own if (weight := _weight(each)) is not None]
            if weights:
                places = enumerate(node.next_functions)
                edges = {place: GradientEdge(each, index) for place, (each, index) in places if each in own}
                branches[node] = Branch(edges, weights)
    elsewhere = _behind([root for root in roots if root not in leading], following)
    return (leading, branches) if taken.isdisjoint(elsewhere) else None


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
