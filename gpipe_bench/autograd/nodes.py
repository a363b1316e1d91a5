"""What the engine's own nodes of the autograd graph have in common.

A phony is an empty tensor that carries an edge of the graph and nothing else. An inlet is where the graph of a task or
a loss begins, and where its backward pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gpipe_bench.autograd.microbatch import Values, differentiable, replace


def apply(function: type[Function], *args: Any) -> Any:
    """Make a node: ``function.apply``, which PyTorch has not annotated."""
    return function.apply(*args)  # type: ignore[no-untyped-call, unused-ignore]  # see above


def behind(function: type[Function], values: Values, *args: Any) -> Values:
    """``values`` with those that require a gradient behind a node; ``function`` takes ``args``, then these tensors."""
    indices = differentiable(values)
    if not indices:
        return values
    return replace(values, indices, apply(function, *args, *(values[index] for index in indices)))


class _Apart(Function):
    """x -> x."""

    # No code of a user: it may run again.
    is_pure_to_gpipe_bench = True

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Any:
        return pass_through(ctx, (value,), (True,))[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        return grads[0]


def pass_through(ctx: FunctionCtx, values: Sequence[Any], needs_grad: Sequence[bool]) -> tuple[Any, ...]:
    """What the forward of a node between tasks returns: ``values``, its tensors detached.

    A function that returns its input as it is breaks autograd functions in the user's model. A gradient that is None
    reaches ``backward`` as None: for zeros, autograd would synchronise streams (pytorch#151079). A tensor needs a
    gradient behind the node if it does before, as ``needs_grad`` says.
    """
    ctx.set_materialize_grads(False)
    outputs = tuple([value.detach() if isinstance(value, Tensor) else value for value in values])
    if not all(needs_grad):
        pairs = zip(outputs, needs_grad, strict=True)
        ctx.mark_non_differentiable(*[output for output, needed in pairs if isinstance(output, Tensor) and not needed])
    return outputs


def edge_of(value: Tensor) -> GradientEdge:
    """Where the gradient of a value that requires one arrives."""
    if value.layout is torch.strided:
        return get_gradient_edge(value)
    # PyTorch finds the edge by a view, which sparse and jagged tensors do not have.
    with torch.enable_grad():
        token: Any = value.clone().grad_fn
    ((node, number),) = token.next_functions
    return GradientEdge(node, number, token)


def nodes_behind(roots: Iterable[Node | None], ends: Iterable[Node | None] = ()) -> Iterator[Node]:
    """``roots`` and all nodes that they lead to, but ``ends`` and what only these lead to."""
    seen = {None, *ends}
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [each for each, _ in node.next_functions]
            yield node


def is_users(node: Node) -> bool:
    """Whether the backward of a node is a user's code, of Python or of C++, and not one of the engine's own.

    Whatever wrote to a view in place is hidden in a node for the whole tensor, ``CopySlices``. That copies the part of
    the gradient for it, and what it returns. So it counts only where it leads elsewhere, too: weights may branch off.
    """
    if isinstance(node, BackwardCFunction):
        return not getattr(getattr(type(node), "_forward_cls", None), "is_pure_to_gpipe_bench", False)
    if type(node).__name__ == "CopySlices":
        return any(each is not None for each, _ in node.next_functions[1:])
    return type(node).__name__ == "CppFunction"


_phonies: dict[torch.device, Tensor] = {}


def get_phony(device: torch.device) -> Tensor:
    """The phony of a device, shape (0,), made once; it requires no gradient.

    It lives on the device whose order it serves, since autograd runs a node in the thread of the device of its outputs
    (pytorch#135633).
    """
    if device not in _phonies:
        # An inference tensor could never take part in autograd again.
        with torch.inference_mode(mode=False):
            _phonies[device] = torch.empty(0, device=device)
    return _phonies[device]


def new_leaf(device: torch.device) -> Tensor:
    """A phony that requires a gradient, and so keeps a node in the graph when none of its inputs does.

    Each is a leaf of its own, made while the stream of its task is current. When a backward pass ends, autograd makes
    the caller wait for the streams of the leaves it met. A leaf shared by several pipelines would belong to the stream
    that used it first, and gradients of the others could be read before they are written.
    """
    return torch.empty(0, device=device, requires_grad=True)


class Inlet:
    """Gradients of flat values, from their own backward pass and from no other.

    A tensor that a layer keeps aside, such as a loss of its own, is no output. A backward pass that begins there comes
    here too, and its gradients would be lost.

    Attributes:
        indices: of the values that need a gradient.
        leaf: behind the node that takes the gradients, if there is one.
        is_open: whether their own backward pass runs.
        grads: those that have arrived in it.
    """

    __slots__ = ("_count", "grads", "indices", "is_open", "leaf")

    leaf: Tensor

    def __init__(self, values: Values) -> None:
        self.indices, self._count = differentiable(values), len(values)
        self.grads: Sequence[Tensor | None] = ()
        self.is_open = False

    def collect(self, backward: Callable[..., object], *args: Any) -> list[Tensor | None]:
        """Call ``backward(*args)``; gives away the gradients that it brings, one for each value."""
        self.is_open = True
        backward(*args)
        self.is_open = False
        grads, self.grads = self.grads, ()
        return self.spread(grads)

    def spread(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of all values, from those of the values that need one, or from none."""
        found: list[Tensor | None] = [None] * self._count
        for index, grad in zip(self.indices, grads, strict=False):
            found[index] = grad
        return found


class _Receive(Function):
    """(inlet, phony, [values...]) -> values, which backward keeps no hold of: gradients go to the inlet."""

    is_pure_to_gpipe_bench = True

    @staticmethod
    def forward(ctx: Any, inlet: Inlet, _: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inlet = inlet
        return tuple([value.detach() for value in values])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        inlet: Inlet = ctx.inlet
        if not inlet.is_open or inlet.grads:
            raise RuntimeError(
                "with checkpoints or a schedule gradients must come from the pipeline's outputs, got some from a "
                "tensor that a layer keeps aside, or that another layer has from there; return it as an output, or "
                "use checkpoint='never' without a schedule"
            )
        inlet.grads = grads
        return (None, None, None)


def receive(values: Values) -> tuple[Values, Inlet, Node | None]:
    """Flat inputs of a task or a loss as it gets them, their inlet, and the node that takes their gradients there.

    A leaf of the graph would keep its value alive for as long as the graph, whether the layers need it or not, and
    could not be written to. Each value is behind a node of its own: autograd calls the hooks of all outputs of a node,
    with None for those that get no gradient.
    """
    inlet = Inlet(values)
    entering = [values[index] for index in inlet.indices]
    if not entering:
        return values, inlet, None
    inlet.leaf = new_leaf(entering[0].device)
    received = apply(_Receive, inlet, inlet.leaf, entering)
    node: Node = received[0].grad_fn
    if len(received) > 1:
        received = [apply(_Apart, value) for value in received]
    return replace(values, inlet.indices, received), inlet, node


def check_whole(what: str, instead: str) -> None:
    """Within a backward pass, check that it computes gradients of all parameters, once; else name ``instead``."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"second derivatives must not pass through {what}, got create_graph=True; use {instead}")
    # Public would be a way to ask which inputs a backward pass was given; torch.utils.checkpoint asks the same.
    if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]  # noqa: SLF001 - see above
        raise RuntimeError(
            f"gradients through {what} must go to all parameters, got autograd.grad() or backward(inputs=...); call "
            f"backward() without inputs=, or use {instead}"
        )
