"""Turns a module with a traceable forward into an ``nn.Sequential`` of many layers, without changing a weight.

    forward as a graph ─ cut between weighty calls, where least crosses ─ layers, with skips for what passes over some

Every layer but perhaps the first and last has one or more calls of a submodule with weights, and what belongs around
it; where cuts are made stands in :mod:`.cutting`. The chain does, operation by operation, what the module does;
:func:`cut` checks this in training and in evaluation, on tensors without values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from gpipe_bench.errors import UnsupportedError
from gpipe_bench.models.cutting import Cutter, path_of
from gpipe_bench.models.observing import observe, operations
from gpipe_bench.models.pieces import Piece, Router, assemble
from gpipe_bench.models.tracing import trace

__all__ = ["assemble", "chain_of", "cut", "from_original", "to_original"]


def chain_of(
    module: nn.Module, shape: Sequence[int], *, whole: Sequence[type] = (), functions: Sequence[Any] = ()
) -> nn.Sequential:
    """The layers of ``module`` as an ``nn.Sequential``; both share parameters, buffers and submodules.

    Arguments and errors are those of :func:`cut`.
    """
    return assemble(cut(module, shape, whole=whole, functions=functions), module)


def cut(
    module: nn.Module, shape: Sequence[int], *, whole: Sequence[type] = (), functions: Sequence[Any] = ()
) -> tuple[Piece, ...]:
    """Where ``module`` is cut into layers, for this one and for all that are made alike.

    Args:
        module: takes one tensor.
        shape: of its input, (N, C, H, W), with N of at least 2. Other batch sizes do as well.
        whole: classes of submodules that are not cut.
        functions: functions that are not cut.

    Raises:
        UnsupportedError: the forward cannot be traced, or its layers would do something else than the module.
    """
    graph = trace(module, whole, functions)
    _simplify(graph, module)
    facts = observe(module, graph, shape)
    pieces = tuple(Router(Cutter(module, graph, facts)).pieces())
    chain = assemble(pieces, module)
    other = (shape[0] + 1, *shape[1:])
    for training in (True, False):
        if operations(module, module, other, training=training) != operations(module, chain, other, training=training):
            raise UnsupportedError(
                f"the layers of {type(module).__name__} must do what it does, got other operations; "
                "choose another model"
            )
    return pieces


def to_original(state: Mapping[str, Any]) -> dict[str, Any]:
    """A chain's state_dict with the names of the module that it was made of: ``layer.name`` becomes ``name``."""
    return {name.partition(".")[2]: value for name, value in state.items()}


def from_original(chain: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The module's state_dict with the names of the chain; the inverse of :func:`to_original`.

    Args:
        chain: the chain, or a pipeline of it.
        state: of the module.

    Raises:
        KeyError: ``state`` lacks an entry that the chain has.
    """
    return {name: state[name.partition(".")[2]] for name in chain.state_dict()}


def _simplify(graph: fx.Graph, module: nn.Module) -> None:
    """Leave identities out; they have no state."""
    for node in list(graph.nodes):
        if node.op == "call_module" and type(module.get_submodule(path_of(node.target))) is nn.Identity:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
