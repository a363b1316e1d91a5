"""The layers between the cuts of a network: what each calls, and how values reach it.

A tensor that the next layer uses is its input; one for later layers is a skip, handed on from user to user.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from gpipe_bench.models.cutting import Cutter, path_of, state_of
from gpipe_bench.models.traced_layer import Own, Program, Ref, Step, TracedLayer
from gpipe_bench.skip import Namespace


@dataclass(frozen=True, slots=True)
class Piece:
    """One layer of a network that is cut, before it has parameters.

    Attributes:
        name: of the layer.
        program: what it does.
        parts: paths of the submodules, parameters and buffers of the network that it holds.
        transient: paths of buffers that are not part of the network's state.
        weights: how many numbers its parameters have.
    """

    name: str
    program: Program
    parts: tuple[str, ...]
    transient: frozenset[str]
    weights: int


def heavy_layer(pieces: Sequence[Piece]) -> str | None:
    """What to know of a cut in which one layer holds more than half of the weights, in a line; None for another cut."""
    weights = [piece.weights for piece in pieces]
    most, total = max(weights), sum(weights)
    if len(pieces) == 1:
        return "it is one layer, which no balance can divide"
    if 2 * most <= total:
        return None
    name, share = pieces[weights.index(most)].name, round(100 * most / total)
    return f"one of the {len(pieces)} layers, {name}, holds {share} % of the weights; no balance can divide it"


def assemble(pieces: Sequence[Piece], module: nn.Module) -> nn.Sequential:
    """The layers of ``module`` between cuts that were found for it, or for a module made alike."""
    state, namespace = state_of(module), Namespace()

    def part(path: str) -> nn.Module | Tensor:
        return state[path] if path in state else module.get_submodule(path)

    layers = OrderedDict[str, nn.Module]()
    for piece in pieces:
        layer = TracedLayer(piece.program, {path: part(path) for path in piece.parts}, piece.transient)
        layers[piece.name] = layer.isolate(namespace)
    return nn.Sequential(layers)


class Router:
    """Builds layers, and decides how each value reaches them."""

    def __init__(self, cutter: Cutter) -> None:
        self.cutter = cutter

    def pieces(self) -> Iterator[Piece]:
        """One for each stretch between two cuts."""
        stretches = [self.cutter.calls[a:b] for a, b in pairwise(self.cutter.cuts())]
        hops = self._hops(stretches)
        programs = [self._program(k, stretch, hops, len(stretches)) for k, stretch in enumerate(stretches)]
        holdings = self._holdings([self._parts(stretch) for stretch in stretches])
        transient = frozenset(set(self.cutter.state) - set(self.cutter.module.state_dict(keep_vars=True)))
        for name, program, held in zip(self._names(stretches), programs, holdings, strict=True):
            yield Piece(name, program, tuple(sorted(held)), transient, self._weights(held))

    def _holdings(self, parts: Sequence[set[str]]) -> list[set[str]]:
        """What each layer holds: the parts that it calls, and the rest of the state, each tensor in one layer only."""
        state = self.cutter.state
        holder = {id(state[name]): k for k, paths in enumerate(parts) for name in state if _is_below(name, paths)}
        holdings = [set(paths) for paths in parts]
        for name, tensor in state.items():
            # Another name of a tensor that a layer uses; what the forward never uses is in the last layer.
            held = holdings[holder.get(id(tensor), -1)]
            if not _is_below(name, held):
                held.add(name)
        return holdings

    def _weights(self, held: set[str]) -> int:
        state = self.cutter.state.items()
        own = {id(part): part for name, part in state if isinstance(part, nn.Parameter) and _is_below(name, held)}
        return sum(part.numel() for part in own.values())

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

    def _parts(self, stretch: Sequence[fx.Node]) -> set[str]:
        submodules = {path_of(node.target) for node in stretch if node.op == "call_module"}
        arguments = (argument for node in stretch for argument in node.all_input_nodes if argument.op == "get_attr")
        return submodules | ({path_of(argument.target) for argument in arguments} & self.cutter.state.keys())

    def _names(self, stretches: Sequence[Sequence[fx.Node]]) -> list[str]:
        """Each layer is named for its heaviest call of a submodule."""
        names: list[str] = []
        for k, stretch in enumerate(stretches):
            modules = [node for node in stretch if node.op == "call_module"]
            heaviest = max(modules, key=lambda node: self.cutter.work[self.cutter.place[node]], default=None)
            name = f"layer{k}" if heaviest is None else path_of(heaviest.target).replace(".", "_")
            names.append(name if name not in names else f"{name}_{k}")
        return names


def _is_below(name: str, paths: set[str]) -> bool:
    """Whether a parameter or buffer is one of the paths, or of a submodule that is."""
    words = name.split(".")
    return any(".".join(words[:count]) in paths for count in range(1, len(words) + 1))


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
        call: Any = Own(path_of(node.target)) if node.op == "call_module" else node.target
        drop = tuple(name for name, user in last.items() if user is node and name not in kept)
        yield Step(node.name, call, _arguments(node.args), _arguments(node.kwargs), drop)


def _arguments(value: Any) -> Any:
    """Arguments of a node, with its inputs as references."""

    def reference(node: fx.Node) -> Any:
        return Own(path_of(node.target)) if node.op == "get_attr" else Ref(node.name)

    return fx.map_arg(value, reference)
