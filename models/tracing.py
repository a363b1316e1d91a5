"""Writes a module's forward down as a graph of calls, the same in training and in evaluation.

The graph is that of ``torch.fx`` (Reed et al., arXiv 2112.08429). Tracing goes down into submodules as far as it can:
one whose forward cannot be traced, or reads differently in training and in evaluation, stays whole and runs its own
code. What no graph can say (data-dependent control flow) is therefore no obstacle inside a block.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, fx, nn

from gpipe_bench.errors import UnsupportedError

ROOT = "network"
"""Submodules are named below this in a graph."""

MODE: Final = "training"
"""The attribute of every module that says whether it trains; a layer that a graph was cut into has it as well."""

_MOST_TRIES = 50


class Entry(nn.Module):
    """Calls the module with its input alone, so that other arguments keep their defaults."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.add_module(ROOT, module)

    def forward(self, x: Tensor) -> Any:
        """What the module gives for ``x``."""
        return getattr(self, ROOT)(x)


class _Proxy(fx.Proxy):
    """A proxy that writes ``x += y`` down as what it is; that of ``torch.fx`` writes ``x = x + y``."""

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})


class _Tracer(fx.Tracer):
    """Goes down as far as it can; adds what it could not go into to ``whole``."""

    def __init__(self, whole: dict[str, Exception | None], kinds: tuple[type, ...], functions: tuple[Any, ...]) -> None:
        super().__init__(autowrap_functions=functions)
        self._whole, self._kinds = whole, kinds

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = module_qualified_name in self._whole or isinstance(m, self._kinds)
        return known or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(m)
        count, stack = len(self.graph.nodes), self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:  # noqa: BLE001 - whatever the forward of the module raises when it meets a proxy
            for node in list(self.graph.nodes)[: count - 1 : -1]:
                self.graph.erase_node(node)
            self.module_stack = stack
            self._whole[name] = error
            return self.create_proxy("call_module", name, args, kwargs)


def trace(module: nn.Module, kinds: Sequence[type] = (), functions: Sequence[Any] = ()) -> fx.Graph:
    """The graph of ``module(x)``, which holds in training and in evaluation.

    Args:
        module: what to trace; it is left as it was.
        kinds: classes of submodules that are not traced into.
        functions: functions that become one call each.

    Raises:
        UnsupportedError: the module's own forward cannot be traced, or depends on the mode.
    """
    whole: dict[str, Exception | None] = {}
    for _ in range(_MOST_TRIES):
        before = len(whole)
        graphs = []
        for training in (True, False):
            with mode(module, training=training):
                graphs.append(_Tracer(whole, tuple(kinds), tuple(functions)).trace(Entry(module)))
        _ask_for_mode(*graphs)
        if ROOT in whole:
            reason = f"{type(whole[ROOT]).__name__}: {whole[ROOT]}".partition("\n")[0]
            raise UnsupportedError(_refusal(module, f"a forward that cannot be traced ({reason})"))
        if len(whole) > before:
            continue
        different = _first_difference(*graphs) or _first_constant(module, graphs[0])
        if different is None:
            return graphs[0]
        if different in whole or different in ("", ROOT):
            raise UnsupportedError(
                _refusal(module, "one that reads differently in training and evaluation, or makes tensors by itself")
            )
        whole[different] = None
    raise UnsupportedError(_refusal(module, "one that differs in too many places"))


def _ask_for_mode(training: fx.Graph, evaluation: fx.Graph) -> None:
    """Where the module itself passes its mode on, as in ``dropout(x, training=self.training)``, let both graphs ask."""
    for one, other in zip(list(training.nodes), list(evaluation.nodes), strict=False):
        same = (one.op, one.target, str(one.args)) == (other.op, other.target, str(other.args))
        if not same or one.kwargs.keys() != other.kwargs.keys() or _common_module(one, other) != ROOT:
            continue
        for name, value in one.kwargs.items():
            if (value, other.kwargs[name]) == (True, False):
                for graph, node in ((training, one), (evaluation, other)):
                    with graph.inserting_before(node):
                        node.update_kwarg(name, graph.get_attr(f"{ROOT}.{MODE}"))


def _refusal(module: nn.Module, got: str) -> str:
    name = type(module).__name__
    return (
        f"{name} must have a forward that torch.fx can trace, got {got}; run it as one layer, or choose another model"
    )


def _first_difference(one: fx.Graph, other: fx.Graph) -> str | None:
    """The innermost submodule in which two graphs begin to differ; None if they are equal."""
    ones, others = list(one.nodes), list(other.nodes)
    for a, b in zip(ones, others, strict=False):
        if (a.op, a.target, str(a.args), str(a.kwargs)) != (b.op, b.target, str(b.args), str(b.kwargs)):
            return _common_module(a, b)
    return None if len(ones) == len(others) else ROOT


def _first_constant(module: nn.Module, graph: fx.Graph) -> str | None:
    """The innermost submodule that uses a tensor which is none of its parameters or buffers; None if there is none."""
    known = {
        f"{ROOT}.{name}"
        for tensors in (module.named_parameters, module.named_buffers)
        for name, _ in tensors(remove_duplicate=False)
    } | {f"{ROOT}.{MODE}"}
    strange = (node for node in graph.nodes if node.op == "get_attr" and node.target not in known)
    return next((_common_module(node, node) for node in strange), None)


def _common_module(a: fx.Node, b: fx.Node) -> str:
    """The innermost module whose forward both nodes come from."""
    stacks = [
        [name for name, _ in node.meta.get("nn_module_stack", {}).values() if name != node.target] for node in (a, b)
    ]
    common = [name for name in stacks[0] if name in stacks[1]]
    return common[-1] if common else ROOT


@contextmanager
def mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Training or evaluation for a while, then every submodule as it was."""
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, flag in before:
            part.training = flag
