"""Where each skip of a partitioned model starts and ends, as the layers declare it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from gpipe_bench.errors import SkipLayoutError
from gpipe_bench.skip.namespace import SkipKey
from gpipe_bench.skip.skippable import Skippable


@dataclass(frozen=True)
class SkipLayout:
    """Source and destination partition of each skip, in the order of the stashes.

    Attributes:
        routes: skip key -> (source partition, destination partition).
    """

    routes: dict[SkipKey, tuple[int, int]]

    def arrivals(self, j: int) -> list[SkipKey]:
        """Skips that come to partition j from another one."""
        return [key for key, (source, target) in self.routes.items() if target == j and source != j]

    def departures(self, j: int) -> list[SkipKey]:
        """Skips that partition j stashes for another one."""
        return [key for key, (source, target) in self.routes.items() if source == j and target != j]

    def passing(self, j: int) -> list[SkipKey]:
        """Skips that travel with a micro-batch when it leaves partition j, without portals."""
        return [key for key, (source, target) in self.routes.items() if source <= j < target]


def inspect_skip_layout(partitions: Sequence[nn.Module]) -> SkipLayout:
    """The layout of the skips between ``partitions``; run :func:`verify_skippables` on the whole module first."""
    sources: dict[SkipKey, int] = {}
    targets: dict[SkipKey, int] = {}
    for j, partition in enumerate(partitions):
        for _, layer in _skippables(partition.named_modules()):
            sources.update(dict.fromkeys(layer.stashes(), j))
            targets.update(dict.fromkeys(layer.pops(), j))
    return SkipLayout({key: (source, targets[key]) for key, source in sources.items()})


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every skip has one layer that stashes it and one later layer that pops it.

    Only the declarations of :func:`skippable` count; no layer runs.

    Args:
        module: the whole model, before it is cut.

    Raises:
        SkipLayoutError: a TypeError that lists every mismatch.
    """
    stashed: set[SkipKey] = set()
    popped: set[SkipKey] = set()
    problems: list[str] = []
    for path, layer in _skippables(module.named_modules()):
        stashes = layer.stashes()
        for key in layer.pops():
            if key in stashes:
                problems.append(f"layer '{path}' both stashes and pops {key[1]!r}")
            elif key in popped:
                problems.append(f"layer '{path}' pops {key[1]!r}, which an earlier layer popped already")
            elif key not in stashed:
                problems.append(f"layer '{path}' pops {key[1]!r}, which no earlier layer stashes")
            popped.add(key)
        for key in stashes:
            if key in stashed:
                problems.append(f"layer '{path}' stashes {key[1]!r}, which an earlier layer stashed already")
            stashed.add(key)
    problems += [f"no layer pops {name!r}" for _, name in sorted(stashed - popped, key=lambda key: key[1])]
    if problems:
        raise SkipLayoutError(
            "every skip must be stashed once and popped once by a later layer, got "
            + "; ".join(problems)
            + "; correct the declarations, or isolate() layers that use equal names"
        )


def _skippables(named: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Skippable]]:
    for path, layer in named:
        if isinstance(layer, Skippable):
            yield path, layer
