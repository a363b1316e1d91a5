"""Writes a module's forward down as a graph of calls, the same in training and in evaluation, and observes one run.

The graph is that of ``torch.fx`` (Reed et al., arXiv 2112.08429). Tracing goes down into submodules as far as it can:
one whose forward cannot be traced, or reads differently in training and in evaluation, stays whole and runs its own
code. What no graph can say (data-dependent control flow) is therefore no obstacle inside a block.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gpipe_bench.errors import UnsupportedError

__all__ = ["ROOT", "Facts", "observe", "operations", "trace"]

ROOT = "network"
"""Submodules are named below this in a graph."""

# A memory-bound operation takes as long as this many floating-point operations per byte that it touches.
_FLOPS_PER_BYTE = 32
_MOST_TRIES = 50


class _Entry(nn.Module):
    """Calls the module with its input alone, so that other arguments keep their defaults."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.add_module(ROOT, module)

    def forward(self, x: Tensor) -> Any:
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
            with _mode(module, training=training):
                graphs.append(_Tracer(whole, tuple(kinds), tuple(functions)).trace(_Entry(module)))
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
    }
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
def _mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Training or evaluation for a while, then every submodule as it was."""
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, flag in before:
            part.training = flag


@dataclass
class Facts:
    """What one run showed of each node of a graph, by name.

    Attributes:
        nbytes: bytes of the result; nodes whose result is no Tensor are missing.
        storages: identity of the memory of the result.
        written: identities of the memories that the node wrote into.
        work: floating-point operations, and bytes touched at a fixed rate.
    """

    nbytes: dict[str, int] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)
    written: dict[str, set[int]] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)


def observe(module: nn.Module, graph: fx.Graph, shape: Sequence[int]) -> Facts:
    """Run the graph in training on an input without values; nothing is computed, written or drawn.

    Args:
        module: the graph's module.
        graph: from :func:`trace`.
        shape: of the input, (N, C, H, W).
    """
    with _mode(module, training=True), _without_values(module):
        run = _Observer(_Entry(module), graph)
        run.run(_input(module, shape))
        return run.facts


def operations(module: nn.Module, forward: nn.Module, shape: Sequence[int], *, training: bool) -> list[Any]:
    """Every operation with the shapes it gives, in order, as ``forward`` runs the parts of ``module``."""
    with (
        _mode(module, training=training),
        _mode(forward, training=training),
        _without_values(module),
        _Operations() as seen,
    ):
        forward(_input(module, shape))
    done: list[Any] = seen.done
    return done


def _input(module: nn.Module, shape: Sequence[int]) -> Tensor:
    parameter = next(module.parameters(), None)
    return torch.empty(tuple(shape), device=None if parameter is None else parameter.device)


@contextmanager
def _without_values(module: nn.Module) -> Iterator[None]:
    # Random operations without values draw nothing; the state is kept for those that a forward draws by itself.
    # A count of batches on the CPU does change, since PyTorch computes with known numbers.
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng([]), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves the mode untyped
    """Notes operations, what they write into, and their work."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.done: list[Any] = []
        self.written: set[int] = set()
        self.work = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given, gave = _tensors([args, list(kwargs.values())]), _tensors(result)
        self.done.append((str(func), [tuple(tensor.shape) for tensor in gave]))
        for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - what PyTorch declares
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                self.written |= {_storage(tensor) for tensor in _tensors(value)}
        if not func.is_view:
            self.work += _FLOPS_PER_BYTE * sum(tensor.nbytes for tensor in [*given, *gave])
        count = flop_registry.get(func._overloadpacket)  # noqa: SLF001 - the registry's own keys
        if count is not None:
            self.work += count(*args, **kwargs, out_val=result)
        return result


class _Observer(fx.Interpreter):
    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self.facts = Facts()
        # Memory that is freed would be handed out again, and look like the same.
        self._alive: list[Any] = []

    def run_node(self, n: fx.Node) -> Any:
        with _Operations() as seen:
            result = super().run_node(n)
        self._alive.append(result)
        self.facts.written[n.name] = seen.written
        self.facts.work[n.name] = seen.work
        if isinstance(result, Tensor):
            self.facts.nbytes[n.name] = result.nbytes
            self.facts.storages[n.name] = _storage(result)
        return result


def _storage(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - no two that are alive have the same
    return identity


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []
