"""B cut into I, the gradients of the inputs, and W, those of the weights (Zero Bubble, arXiv 2401.10241, section 2).

    output ─► Linear 2 ─► Tanh ─► Linear 1 ─► input          I runs this way, and notes what arrives at each node
                 │                   │                       from which weights branch off. W begins at these nodes
              weight 2            weight 1                   and runs into the branches alone.

W keeps the noted gradients, and the tensors that its first nodes have saved. For a Linear this is the input, without
which there is no gradient of the weight. All other nodes stay, too, because a node holds those that it leads to, but
their saved tensors are freed when I has ended.

The nodes at which W begins run twice: once for the inputs, once for the weights. Only nodes that PyTorch itself defines
may do so. A user's code runs once, in I, together with the gradients of its weights: custom functions, compiled layers
and nodes with a hook behind them may write to their gradients, add to attributes of weights, or free what they kept;
so may hooks that unpack what a node has saved.

Two nodes may get one and the same tensor as their gradient, and a user's code may write to it. So W keeps copies of the
gradients where such code runs in I. Where such code may stand in a branch, the branch gets a copy of its own from W.

A call of autograd walks over all nodes that its roots lead to. If W began its calls at these nodes, its host time
would grow with the square of the number of layers. So W calls each node itself, as ``node(*grads)``, within a task of
autograd that needs the gradients of the branches: a node computes only what the running task needs. Autograd begins
behind it.

PyTorch documents ``Node.next_functions``, ``Node.register_hook``, ``GradientEdge``, ``backward(inputs=)`` and hooks of
saved tensors. It does not document ``node(*grads)``, what a node computes (a comment in its C++ header says it, at
``task_should_compute_output``), ``hooks_dict_ref``, the number of a task, and the engine's ``run_backward``.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gpipe_bench.autograd.microbatch import has_memory
from gpipe_bench.autograd.nodes import is_users
from gpipe_bench.autograd.saved import Packed, has_hooks, pack_saved

Grads = tuple[Tensor | None, ...]

_WHOLE: Final = {"CheckpointFunctionBackward", "GuardBackward", "CollectBackward"}
"""Nodes that refuse to run unless the backward pass is for all weights: reentrant checkpoints, pipelines in a layer."""


class Branch:
    """A node on the way to the inputs, from which weights branch off: a hook behind it, which notes what arrives in I.

    The node refers to its hook, so the hook must not refer to the node: Python does not see through nodes.

    Attributes:
        edges: those that lead to the weights, by their places among the edges of the node.
        weights: those that branch off.
        copies: whether to note copies.
        grads: the gradients that have arrived; none before I, and after W.
    """

    __slots__ = ("_task", "copies", "edges", "grads", "weights")

    def __init__(self, edges: dict[int, GradientEdge], weights: list[Tensor]) -> None:
        self.edges, self.weights = edges, weights
        self.copies = False
        self.grads: Grads = ()
        self._task = sys.maxsize

    def __call__(self, _: Grads, grads: Grads) -> None:
        """Note what has arrived. A user's hook may run a backward pass of its own through this node within I."""
        task = torch._C._current_graph_task_id()  # noqa: SLF001 - checkpoints of PyTorch tell passes apart by it, too
        # The outer pass began first, and numbers grow.
        if task <= self._task:
            self._task = task
            self.grads = tuple([grad if grad is None else grad.clone() for grad in grads]) if self.copies else grads

    def found(self, node: Node) -> list[tuple[GradientEdge, Tensor]]:
        """The gradients that go into the branches."""
        grads, self.grads = self.grads, ()
        if all(grad is None for grad in grads):
            return []
        # Not annotated. A function of Python that is pure stands for a node of PyTorch, as in the simulator's traces.
        call: Any = node.apply if isinstance(node, BackwardCFunction) else node
        given = call(*grads)
        given = given if isinstance(given, tuple) else (given,)
        pairs = [(edge, grad) for place, edge in self.edges.items() if (grad := given[place]) is not None]
        noted = {grad.data_ptr() for grad in grads if grad is not None and has_memory(grad)}
        return [(edge, grad.clone() if _shares(edge, grad, noted) else grad) for edge, grad in pairs]


class WeightsLater:
    """What W has to do. The last of ``branches`` comes first, as in I.

    ``ends`` are edges and gradients that do not lead to the inputs at all. ``packed`` are the saved tensors of all
    other nodes.
    """

    def __init__(self, branches: dict[Node, Branch], ends: list[tuple[GradientEdge, Tensor]]) -> None:
        self._branches, self._ends = branches, ends
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

    def _run_branches(self) -> None:
        """Call each node, and let autograd begin behind it.

        A weight copies a gradient that somebody else holds, as ``grads`` does here: no two weights keep the same one.
        """
        # It sums a gradient up to the shape of its weight. torch.autograd.backward refuses such a gradient.
        run_backward = torch.autograd.Variable._execution_engine.run_backward  # noqa: SLF001 - it has no public name
        while self._branches:
            node, branch = self._branches.popitem()
            found = branch.found(node)
            if found:
                edges, grads = zip(*found, strict=True)
                run_backward(edges, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)
                del edges, grads
            del found


def backward_inputs(
    edges: Sequence[GradientEdge], grads: Sequence[Tensor], end: Node, leaf: Tensor
) -> WeightsLater | None:
    """I: runs into the inputs, and gives what W has to do.

    Args:
        edges: where the backward pass begins.
        grads: a gradient for each.
        end: the node of the inputs.
        leaf: behind it.

    Returns:
        None, without having done anything, where there is nothing to cut: weights cannot be told apart (one that is
        used twice, or what is computed from it), all belong to a user's code, or a node wants a whole backward pass.
    """
    cut = None if torch.is_anomaly_enabled() else find_branches([edge.node for edge in edges], end)
    if cut is None:
        return None
    leading, branches = cut
    users = {node for node in leading if node is not end and is_users(node)}
    users |= {node for node in branches if has_hooks(node)}
    ends = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge.node not in leading]
    waiting = {node: branch for node, branch in branches.items() if node not in users and _waits(node, branch)}
    # A node that has a hook is the user's as much as one of a custom function.
    copies = bool(users) or len(waiting) < len(branches)
    if branches and not waiting and not ends:
        return None
    for branch in waiting.values():
        branch.copies = copies
    later = WeightsLater(waiting, [(edge, grad.clone()) for edge, grad in ends] if copies else ends)
    through = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge.node in leading]
    if through:
        later.packed = pack_saved([node for node in leading if node is not end and node not in waiting])
        now = [weight for node, branch in branches.items() if node not in waiting for weight in branch.weights]
        roots, theirs = zip(*through, strict=True)
        torch.autograd.backward(roots, theirs, retain_graph=True, inputs=[leaf, *now])
    return later


def _waits(node: Node, branch: Branch) -> bool:
    """Let ``branch`` note what arrives at ``node``; not where a user's hook is called after the node, too."""
    handle = node.register_hook(branch)
    if len(handle.hooks_dict_ref() or ()) == 1:
        return True
    handle.remove()
    return False


def _shares(edge: GradientEdge, grad: Tensor, noted: Collection[int]) -> bool:
    """Whether a user's code may write to a gradient that is noted. Behind a weight without hooks there is none."""
    weight = getattr(edge.node, "variable", None)
    untouched = weight is not None and not weight._backward_hooks  # noqa: SLF001 - there is no public way to ask
    return not untouched and has_memory(grad) and grad.data_ptr() in noted


def find_branches(roots: Sequence[Node], end: Node) -> tuple[Collection[Node], dict[Node, Branch]] | None:
    """The nodes that lead from ``roots`` to ``end``, and those among them from which weights branch off.

    A node comes after those that it leads to.

    Returns:
        None if branches meet, or a branch and what is behind a root that does not lead to ``end``, or if a node wants
        a whole backward pass.
    """
    leading: set[Node] = {end}
    branches: dict[Node, Branch] = {}
    taken: set[Node] = set()
    following: dict[Node, Sequence[tuple[Node | None, int]]] = {end: ()}
    todo = list(roots)
    while todo:
        node = todo[-1]
        if node not in following:
            following[node] = node.next_functions
            new = [each for each, _ in following[node] if each is not None and each not in following]
            if new:
                todo += new
                continue
        # What follows has been here.
        todo.pop()
        edges = following[node]
        if node in leading or all(each not in leading for each, _ in edges):
            continue
        leading.add(node)
        aside = [each for each, _ in edges if each is not None and each not in leading]
        own = _behind(aside, following) if aside else set()
        if not taken.isdisjoint(own):
            return None
        taken |= own
        # documented, but not annotated
        weights = [each.variable for each in own if type(each).__name__ == "AccumulateGrad"]  # type: ignore[attr-defined]
        if weights:
            leaving = {place: GradientEdge(each, k) for place, (each, k) in enumerate(edges) if each in own}
            branches[node] = Branch(leaving, weights)
    elsewhere = _behind([root for root in roots if root not in leading], following)
    whole = any(type(node).__name__ in _WHOLE for node in leading)
    return None if whole or not taken.isdisjoint(elsewhere) else (leading, branches)


def _behind(nodes: Sequence[Node], following: dict[Node, Sequence[tuple[Node | None, int]]]) -> set[Node]:
    """These nodes and all that they lead to."""
    found: set[Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [each for each, _ in following[node] if each is not None]
    return found
