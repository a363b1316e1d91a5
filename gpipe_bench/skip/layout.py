"""Where each skip of a partitioned model starts and ends, as the layers declare it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from gpipe_bench.errors import SkipLayoutError
from gpipe_bench.schedules.messages import holder
from gpipe_bench.skip.namespace import SkipKey
from gpipe_bench.skip.skippable import Skippable


class SkipCopy(NamedTuple):
    """A copy of a skip that goes to other partitions.

    Attributes:
        key: of the skip.
        reader: which of the layers that read the skip has this copy; 0 if they share it.
    """

    key: SkipKey
    reader: int = 0


@dataclass(frozen=True, slots=True)
class PartitionSkips:
    """The skips of one partition.

    Attributes:
        incoming: copies that a task takes in, in order.
        outgoing: copies that a task gives out, in order.
        previous: of each incoming copy the partition that had it before, to which its gradient goes.
        sources: of each incoming copy the partition from which it comes: one on the same device, or the previous one.
        targets: of each outgoing copy the partitions that take it from here.
        uses: how many layers here read each incoming copy, and one more if it goes on.
        stashed: how many layers here read each skip that is stashed here, and how many copies of it go out.
        shared: outgoing copies of skips that several partitions read.
    """

    incoming: list[SkipCopy] = field(default_factory=list)
    outgoing: list[SkipCopy] = field(default_factory=list)
    previous: dict[SkipCopy, int] = field(default_factory=dict)
    sources: dict[SkipCopy, int] = field(default_factory=dict)
    targets: dict[SkipCopy, list[int]] = field(default_factory=dict)
    uses: dict[SkipCopy, int] = field(default_factory=dict)
    stashed: Counter[SkipKey] = field(default_factory=Counter)
    shared: set[SkipCopy] = field(default_factory=set)


@dataclass(frozen=True)
class SkipLayout:
    """Where the skips of a partitioned model begin and end.

    Attributes:
        routes: for each skip the partition that stashes it, then that of each layer that reads it, in order; in the
            order of the stashes.
    """

    routes: dict[SkipKey, tuple[int, ...]]

    def chains(self, *, shared: bool) -> dict[SkipCopy, tuple[int, ...]]:
        """For each copy that leaves its partition: that one, then those that read it, in order.

        Args:
            shared: whether all layers that read a skip share its copies. Else each has one of its own.
        """
        found: dict[SkipCopy, tuple[int, ...]] = {}
        for key, (source, *readers) in self.routes.items():
            for number, group in enumerate([readers] if shared else [[reader] for reader in readers]):
                chain = tuple(dict.fromkeys((source, *group)))
                if len(chain) > 1:
                    found[SkipCopy(key, number)] = chain
        return found

    def at(self, j: int, places: Sequence[Hashable], *, portals: bool, shared: bool) -> PartitionSkips:
        """The skips of partition j.

        With portals a copy goes directly to the partitions that read it, and once to each place. Else it rides along,
        and every partition between takes it in and gives it out.

        Args:
            j: the partition.
            places: where each partition is.
            portals: see above.
            shared: see :meth:`chains`.
        """
        found = PartitionSkips()
        for key, (source, *readers) in self.routes.items():
            if source == j:
                found.stashed[key] += readers.count(j)
        for copy, direct in self.chains(shared=shared).items():
            chain = direct if portals else tuple(range(direct[0], direct[-1] + 1))
            if j not in chain:
                continue
            leaves = j != chain[-1]
            if j == chain[0]:
                found.stashed[copy.key] += 1
            else:
                found.incoming.append(copy)
                found.previous[copy] = chain[chain.index(j) - 1]
                found.sources[copy] = holder(chain, j, places) if portals else j - 1
                found.uses[copy] = leaves + (self.routes[copy.key][1:].count(j) if shared else j == direct[-1])
            if leaves:
                found.outgoing.append(copy)
                found.targets[copy] = [k for k in chain[1:] if holder(chain, k, places) == j] if portals else [j + 1]
                if len(set(self.routes[copy.key])) > 2:
                    found.shared.add(copy)
        return found


def inspect_skip_layout(partitions: Sequence[nn.Module]) -> SkipLayout:
    """The layout of the skips between ``partitions``; run :func:`verify_skippables` on the whole module first."""
    routes: dict[SkipKey, tuple[int, ...]] = {}
    for j, partition in enumerate(partitions):
        for _, layer in _skippables(partition.named_modules()):
            routes |= {key: (*routes[key], j) for key in (*layer.pops(), *layer.peeks())}
            routes |= dict.fromkeys(layer.stashes(), (j,))
    return SkipLayout(routes)


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every skip has one layer that stashes it and later layers that read it.

    Any number of layers peek; a pop comes last. Only the declarations of :func:`skippable` count; no layer runs.

    Args:
        module: the whole model, before it is cut.

    Raises:
        SkipLayoutError: a TypeError that lists every mismatch.
    """
    stashed: set[SkipKey] = set()
    popped: set[SkipKey] = set()
    read: set[SkipKey] = set()
    problems: list[str] = []
    for path, layer in _skippables(module.named_modules()):
        stashes, pops = layer.stashes(), layer.pops()
        for verb, keys in (("pops", pops), ("peeks", layer.peeks())):
            for key in keys:
                if key in stashes:
                    problems.append(f"layer '{path}' both stashes and {verb} {key[1]!r}")
                elif key in popped:
                    problems.append(f"layer '{path}' {verb} {key[1]!r}, which an earlier layer popped already")
                elif key not in stashed:
                    problems.append(f"layer '{path}' {verb} {key[1]!r}, which no earlier layer stashes")
                elif verb == "peeks" and key in pops:
                    problems.append(f"layer '{path}' both pops and peeks {key[1]!r}")
                read.add(key)
        popped.update(pops)
        for key in stashes:
            if key in stashed:
                problems.append(f"layer '{path}' stashes {key[1]!r}, which an earlier layer stashed already")
            stashed.add(key)
    problems += [f"no layer reads {name!r}" for _, name in sorted(stashed - read, key=lambda key: key[1])]
    if problems:
        raise SkipLayoutError(
            "every skip must be stashed once and read by later layers, of which only the last one pops it, got "
            + "; ".join(problems)
            + "; correct the declarations, or isolate() layers that use equal names"
        )


def _skippables(named: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Skippable]]:
    for path, layer in named:
        if isinstance(layer, Skippable):
            yield path, layer
