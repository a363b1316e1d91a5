"""Turns a module with a traceable forward into an ``nn.Sequential`` of many layers, without changing a weight.

    forward as a graph ─ cut between weighty calls, where least crosses ─ layers, with skips for what passes over some

Every layer but perhaps the first and last has one or more calls of a submodule with weights, and what belongs around
it. A cut falls only where tensors cross and nothing else, none of them shares memory that is written later, and no
parameter is needed on both sides. A tensor that the next layer uses is its input; one for later layers is a skip,
handed on from user to user.

The chain does, operation by operation, what the module does; :func:`chain_of` checks this in training and in
evaluation, on tensors without values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from torch import Tensor, fx, nn

from gpipe_bench.errors import UnsupportedError
from gpipe_bench.skip import Namespace
from models.traced_layer import Own, Program, Ref, Step, TracedLayer
from models.tracing import ROOT, Facts, observe, operations, trace

__all__ = ["chain_of", "from_original", "to_original"]

# A layer has at least this share of the work; the heaviest should have at most that one.
_LIGHTEST: Final = 1 / 500
_HEAVIEST: Final = 1 / 24
# Tensors that may cross a cut: as few of them as make the heaviest layer light enough.
_CROSSINGS: Final = (2, 4, 8, 32)


def chain_of(
    module: nn.Module, shape: Sequence[int], *, whole: Sequence[type] = (), functions: Sequence[Any] = ()
) -> nn.Sequential:
    """The layers of ``module`` as an ``nn.Sequential``; both share parameters, buffers and submodules.

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
    chain = _Cutter(module, graph, facts).chain()
    other = (shape[0] + 1, *shape[1:])
    for training in (True, False):
        if operations(module, module, other, training=training) != operations(module, chain, other, training=training):
            raise UnsupportedError(
                f"the layers of {type(module).__name__} must do what it does, got other operations; "
                "choose another model"
            )
    return chain


def to_original(state: Mapping[str, Any]) -> dict[str, Any]:
    """A chain's state_dict with the names of the module that it was made of: ``layer.name`` becomes ``name``."""
    return {name.partition(".")[2]: value for name, value in state.items()}


def from_original(chain: nn.Sequential, state: Mapping[str, Any]) -> dict[str, Any]:
    """The module's state_dict with the names of the chain; the inverse of :func:`to_original`.

    Raises:
        KeyError: ``state`` lacks an entry that the chain has.
    """
    return {name: state[name.partition(".")[2]] for name in chain.state_dict()}


def _path(target: object) -> str:
    return str(target).removeprefix(f"{ROOT}.")


def _simplify(graph: fx.Graph, module: nn.Module) -> None:
    """Leave identities out; they have no state."""
    for node in list(graph.nodes):
        if node.op == "call_module" and type(module.get_submodule(_path(node.target))) is nn.Identity:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


class _Cutter:
    """Finds the cuts of a graph and builds the layers between them."""

    def __init__(self, module: nn.Module, graph: fx.Graph, facts: Facts) -> None:
        self.module, self.facts = module, facts
        self.state: dict[str, Tensor] = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        nodes = list(graph.nodes)
        self.input = next(node for node in nodes if node.op == "placeholder")
        self.result = nodes[-1].args[0]
        self.calls = [node for node in nodes if node.op.startswith("call")]
        self.place = {node: place for place, node in enumerate(self.calls)} | {self.input: -1}
        # The output is used after the last call.
        users = {node: [self.place.get(user, len(self.calls)) for user in node.users] for node in self.place}
        self.last_use = {node: max(places, default=-1) for node, places in users.items()}
        self.work = [facts.work.get(node.name, 0.0) for node in self.calls]

    def chain(self) -> nn.Sequential:
        """The layers."""
        layers = _Router(self).layers(self._cuts())
        return nn.Sequential(OrderedDict(layers))

    def _cuts(self) -> list[int]:
        """Places at which a new layer begins, 0 and the end among them."""
        total, best, heaviest = sum(self.work), [0, len(self.calls)], float("inf")
        allowed = self._allowed()
        for most in _CROSSINGS:
            cuts = [0, *self._best_places({p: cost for p, cost in allowed.items() if cost[0] <= most}), len(self.calls)]
            weight = max(sum(self.work[a:b]) for a, b in pairwise(cuts))
            if weight < heaviest:
                best, heaviest = cuts, weight
            if heaviest <= _HEAVIEST * total:
                break
        return best

    def _best_places(self, allowed: Mapping[int, tuple[int, int]]) -> Iterator[int]:
        """Between each weighty call and the next, where the fewest bytes cross; the last such place."""
        anchors = [place for place, node in enumerate(self.calls) if self._is_weighty(node)]
        for before, after in pairwise(anchors):
            places = [place for place in range(before + 1, after + 1) if place in allowed]
            if places:
                yield min(places, key=lambda place: (allowed[place][1], -place))

    def _is_weighty(self, node: fx.Node) -> bool:
        if self.work[self.place[node]] < _LIGHTEST * sum(self.work):
            return False
        return any(self.state[path].dim() > 1 for path in self._needs(node) if path in self.state)

    def _needs(self, node: fx.Node) -> set[str]:
        """Names of the parameters and buffers that a call uses."""
        needs = {_path(argument.target) for argument in node.all_input_nodes if argument.op == "get_attr"}
        if node.op == "call_module":
            prefix = f"{_path(node.target)}."
            needs |= {path for path in self.state if path.startswith(prefix)}
        return needs

    def _allowed(self) -> dict[int, tuple[int, int]]:
        """Place of a cut -> how many tensors cross there, and their bytes."""
        bound = self._bound()
        written: dict[int, int] = {}
        for place, node in enumerate(self.calls):
            written.update(dict.fromkeys(self.facts.written.get(node.name, ()), place))
        places: dict[int, tuple[int, int]] = {}
        for cut in range(1, len(self.calls)):
            crossing = [node for node, place in self.place.items() if place < cut <= self.last_use[node]]
            names = [node.name for node in crossing]
            if cut in bound or any(name not in self.facts.nbytes for name in names):
                continue
            if all(written.get(self.facts.storages[name], -1) < cut for name in names):
                places[cut] = len(names), sum(self.facts.nbytes[name] for name in names)
        return places

    def _bound(self) -> set[int]:
        """Places between two calls that use the same parameter or buffer."""
        first: dict[int, int] = {}
        bound: set[int] = set()
        for place, node in enumerate(self.calls):
            for path in self._needs(node):
                bound.update(range(first.setdefault(id(self.state[path]), place) + 1, place + 1))
        return bound


class _Router:
    """Builds layers, and decides how each value reaches them."""

    def __init__(self, cutter: _Cutter) -> None:
        self.cutter = cutter

    def layers(self, cuts: Sequence[int]) -> list[tuple[str, nn.Module]]:
        """Name and layer for each stretch between two cuts."""
        stretches = [self.cutter.calls[a:b] for a, b in pairwise(cuts)]
        hops = self._hops(stretches)
        namespace, unused = Namespace(), set(self.cutter.state)
        programs = [self._program(k, stretch, hops, len(stretches)) for k, stretch in enumerate(stretches)]
        parts = [self._parts(stretch) for stretch in stretches]
        for paths in parts:
            unused -= {name for name in unused for path in paths if name == path or name.startswith(f"{path}.")}
        # What the forward never uses still belongs to the state.
        parts[-1] |= {name: self.cutter.state[name] for name in sorted(unused)}
        transient = set(self.cutter.state) - set(self.cutter.module.state_dict(keep_vars=True))
        names = self._names(stretches)
        return [
            (name, TracedLayer(program, held, transient).isolate(namespace))
            for name, program, held in zip(names, programs, parts, strict=True)
        ]

    def _hops(self, stretches: Sequence[Sequence[fx.Node]]) -> list[tuple[str, int, int]]:
        """(value, layer that has it, layer that it goes to next), for all values and layers."""
        layer = {node: k for k, stretch in enumerate(stretches) for node in stretch}
        last = len(stretches) - 1
        hops: list[tuple[str, int, int]] = []
        stops: dict[str, set[int]] = {}
        for node in self.cutter.place:
            users = {layer.get(user, last) for user in node.users}
            # The input of the chain arrives at its first layer.
            stops[node.name] = users | {layer.get(node, 0)}
        for boundary in range(last):
            # Something has to go from each layer to the next, even if that has no use for it.
            leaving = [visits for visits in stops.values() if boundary in visits and max(visits) > boundary]
            if not any(boundary + 1 in visits for visits in leaving):
                min(leaving, key=lambda visits: _next(visits, boundary)).add(boundary + 1)
        for name, visits in stops.items():
            hops += [(name, here, there) for here, there in pairwise(sorted(visits))]
        return hops

    def _program(self, k: int, stretch: Sequence[fx.Node], hops: Sequence[tuple[str, int, int]], n: int) -> Program:
        chained = tuple(name for name, here, there in hops if there == k == here + 1)
        pops = {f"{name}@{there}": name for name, here, there in hops if there == k > here + 1}
        stashes = {f"{name}@{there}": name for name, here, there in hops if here == k < there - 1}
        given = tuple(Ref(name) for name, here, there in hops if here == k == there - 1)
        gives: Any = given if len(given) > 1 else given[0] if given else None
        if k == n - 1:
            gives = _arguments(self.cutter.result)
        kept = {name for name, here, _ in hops if here == k}
        if k == n - 1:
            kept |= {node.name for node in self.cutter.place if self.cutter.last_use[node] == len(self.cutter.calls)}
        receives = (self.cutter.input.name,) if k == 0 else chained
        return Program(receives, pops, tuple(_steps(stretch, kept)), stashes, gives)

    def _parts(self, stretch: Sequence[fx.Node]) -> dict[str, nn.Module | Tensor]:
        parts: dict[str, nn.Module | Tensor] = {}
        for node in stretch:
            if node.op == "call_module":
                parts[_path(node.target)] = self.cutter.module.get_submodule(_path(node.target))
            attributes = (argument for argument in node.all_input_nodes if argument.op == "get_attr")
            parts |= {_path(argument.target): self.cutter.state[_path(argument.target)] for argument in attributes}
        return parts

    def _names(self, stretches: Sequence[Sequence[fx.Node]]) -> list[str]:
        """Each layer is named for its heaviest call of a submodule."""
        names: list[str] = []
        for k, stretch in enumerate(stretches):
            modules = [node for node in stretch if node.op == "call_module"]
            heaviest = max(modules, key=lambda node: self.cutter.work[self.cutter.place[node]], default=None)
            name = f"layer{k}" if heaviest is None else _path(heaviest.target).replace(".", "_")
            names.append(name if name not in names else f"{name}_{k}")
        return names


def _next(visits: set[int], layer: int) -> int:
    return min(k for k in visits if k > layer)


def _steps(stretch: Sequence[fx.Node], kept: set[str]) -> Iterator[Step]:
    last = {
        argument.name: node
        for node in stretch
        for argument in (*node.all_input_nodes, node)
        if argument.op != "get_attr"
    }
    for node in stretch:
        call: Any = Own(_path(node.target)) if node.op == "call_module" else node.target
        drop = tuple(name for name, user in last.items() if user is node and name not in kept)
        yield Step(node.name, call, _arguments(node.args), _arguments(node.kwargs), drop)


def _arguments(value: Any) -> Any:
    """Arguments of a node, with its inputs as references."""
    if isinstance(value, fx.Node):
        return Own(_path(value.target)) if value.op == "get_attr" else Ref(value.name)
    if isinstance(value, dict):
        return {key: _arguments(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*map(_arguments, (value.start, value.stop, value.step)))
    if isinstance(value, tuple | list):
        return tuple(map(_arguments, value)) if isinstance(value, tuple) else list(map(_arguments, value))
    return value
