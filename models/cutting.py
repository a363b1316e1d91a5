"""Finds where a network can be cut: between weighty calls, where least crosses.

A cut falls only where tensors cross and nothing else, none of them shares memory that is written later, and no
parameter is needed on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final

from torch import Tensor, fx, nn

from gpipe_bench.models.observing import Facts
from gpipe_bench.models.tracing import ROOT

# A layer has at least this share of the work; the heaviest should have at most that one.
_LIGHTEST: Final = 1 / 500
_HEAVIEST: Final = 1 / 24
# Tensors that may cross a cut: as few of them as make the heaviest layer light enough.
_CROSSINGS: Final = (2, 4, 8, 32)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those of two names under both."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def path_of(target: object) -> str:
    """Path of a part in the network, from the target of a node."""
    return str(target).removeprefix(f"{ROOT}.")


class Cutter:
    """Finds the cuts of a graph.

    Args:
        module: the network.
        graph: its calls.
        facts: what one run showed of them.

    Attributes:
        calls: the calls, in order.
        place: place of each call among them; -1 for the input.
        last_use: place of the last use of each result; the number of calls for what the network gives.
        work: of each call.
        result: what the network gives.
        state: its parameters and buffers.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph, facts: Facts) -> None:
        self.module, self.facts = module, facts
        self.state = state_of(module)
        nodes = list(graph.nodes)
        self.input = next(node for node in nodes if node.op == "placeholder")
        self.result = nodes[-1].args[0]
        self.calls = [node for node in nodes if node.op.startswith("call")]
        self.place = {node: place for place, node in enumerate(self.calls)} | {self.input: -1}
        # The output is used after the last call.
        users = {node: [self.place.get(user, len(self.calls)) for user in node.users] for node in self.place}
        self.last_use = {node: max(places, default=-1) for node, places in users.items()}
        self.work = [facts.work.get(node.name, 0.0) for node in self.calls]

    def cuts(self) -> list[int]:
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
        needs = {path_of(argument.target) for argument in node.all_input_nodes if argument.op == "get_attr"}
        if node.op == "call_module":
            prefix = f"{path_of(node.target)}."
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
            for path in self._needs(node) & self.state.keys():
                bound.update(range(first.setdefault(id(self.state[path]), place) + 1, place + 1))
        return bound
