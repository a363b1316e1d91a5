"""Balances that are faster than the balance by time, or that fit a memory which it does not fit.

    settings, the most promising first
        -> layers move off the device that lacks most memory, as long as the devices lack less than before
        -> layers move off the busiest devices, as long as that is faster and all still fit
        -> a setting that would not be the fastest if its devices were always busy is skipped

How long a balance takes and what it needs is known from a simulation without limit; one with the limit confirms what is
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gpipe_bench.suite.simulated_cells import SimulatedCell
    from gpipe_bench.suite.storage.raw import RawResult

_SOURCES: Final = 3
"""Devices, the heaviest first, whose partitions may give layers."""

_TARGETS: Final = 6
"""Partitions that may take the layers of one that gives some."""


@dataclass(slots=True)
class Search:
    """Looks for the fastest balance that fits, over several settings.

    Attributes:
        limit_gib: for the tensors of each device.
        simulate: with the limit; keeps what it made.
        probe: without limit.
        effort: passes of micro-batches through partitions that all simulations may have together.
    """

    limit_gib: float
    simulate: Callable[[SimulatedCell], RawResult]
    probe: Callable[[SimulatedCell], RawResult]
    effort: int
    _seen: dict[str, RawResult] = field(default_factory=dict, init=False)
    _kept: dict[str, RawResult] = field(default_factory=dict, init=False)

    def improve(self, candidates: Iterable[tuple[SimulatedCell, RawResult]], fastest: float = 0.0) -> None:
        """Find the fastest balance of those settings that may be the fastest of all.

        Args:
            candidates: cells and what came of them with the limit.
            fastest: samples per second that are reached already.
        """
        free = [(cell, result if result.row.status == "ok" else self._free(cell)) for cell, result in candidates]
        fits: dict[tuple[str | None, int], RawResult] = {}
        for cell, start in sorted(free, key=lambda pair: -_speed(pair[1])):
            if self.effort <= 0:
                return
            if most_samples_per_s(start) <= fastest:
                continue
            group = cell.schedule, cell.partitions
            # A balance that fits one number of micro-batches or mode is a start for the others.
            starts = [start, *([self._free(cell, balance_of(fits[group]))] if group in fits else [])]
            found = self._descend(cell, min(starts, key=lambda result: self._cost(cell, result)))
            if self._cost(cell, found)[0] == 0:
                limited = self._limited(cell, found)
                fastest = max(fastest, _speed(limited))
                if _speed(limited) > _speed(fits.get(group)):
                    fits[group] = found

    def _descend(self, cell: SimulatedCell, start: RawResult) -> RawResult:
        """Move layers as long as the devices lack less memory, or lack none and are faster; steps shrink."""
        best, lowest = start, self._cost(cell, start)
        step = max(1, max(balance_of(best)) // 4)
        while step:
            for balance in _moves(cell, best, step, full=lowest[0] > 0):
                if self.effort <= 0:
                    return best
                result = self._free(cell, balance)
                if -_speed(result) >= lowest[1] and lowest[0] == 0:
                    continue
                cost = self._cost(cell, result)
                if cost < lowest:
                    best, lowest = result, cost
                    break
            else:
                step //= 2
        return best

    def _free(self, cell: SimulatedCell, balance: Sequence[int] = ()) -> RawResult:
        """A simulation without limit, by the cell's own balance or another; each is made once."""
        asked = cell.changed(balance=balance) if balance else cell
        if asked.id not in self._seen:
            self.effort -= cell.partitions * cell.microbatches
            self._seen[asked.id] = self.probe(asked)
        return self._seen[asked.id]

    def _cost(self, cell: SimulatedCell, result: RawResult) -> tuple[float, float]:
        """GiB that the devices lack, next to none where only the allocator lacks some; then what is slow."""
        lack = sum(max(0.0, record["peak_allocated_gib"] - self.limit_gib) for record in result.devices)
        if lack > 0:
            return lack, -_speed(result)
        # An allocator that is nearly full gives segments back, which takes time.
        limited = self._limited(cell, result)
        if limited.row.status == "ok":
            return 0.0, -_speed(limited)
        reserved: float = sum(record["peak_reserved_gib"] for record in result.devices)
        return 1e-6 * reserved, -_speed(result)

    def _limited(self, cell: SimulatedCell, free: RawResult) -> RawResult:
        """The same as a simulation without limit, with it; each is made once."""
        exact = cell.changed(balance=balance_of(free))
        if exact.id not in self._kept:
            self.effort -= cell.partitions * cell.microbatches
            self._kept[exact.id] = self.simulate(exact)
        return self._kept[exact.id]


def _moves(cell: SimulatedCell, result: RawResult, step: int, *, full: bool) -> Iterator[list[int]]:
    """Balances in which ``step`` layers leave a partition of one of the heaviest devices for another.

    Args:
        cell: the simulated cell.
        result: of its simulation.
        step: how many layers move.
        full: whether memory is what weighs, and not the time that a device is busy.
    """
    balance, placement = balance_of(result), cell.placement
    keys = ("peak_allocated_gib",) if full else ("compute_fraction", "recompute_fraction")
    weights = [sum(record[key] for key in keys) for record in result.devices]
    lightest = sorted(range(len(balance)), key=lambda k: weights[placement[k]])
    for device in sorted(range(len(weights)), key=lambda rank: -weights[rank])[:_SOURCES]:
        for source in (j for j, rank in enumerate(placement) if rank == device and balance[j] > step):
            near = [k for k in (source - 1, source + 1) if 0 <= k < len(balance)]
            for target in list(dict.fromkeys([*near, *lightest]))[:_TARGETS]:
                other = list(balance)
                other[source], other[target] = other[source] - step, other[target] + step
                if target != source:
                    yield other


def most_samples_per_s(result: RawResult) -> float:
    """What no balance of the setting exceeds: its devices would do the same work, and be always busy with it."""
    busy = [record["compute_fraction"] + record["recompute_fraction"] for record in result.devices]
    return _speed(result) / mean(busy) if any(busy) else _speed(result)


def balance_of(result: RawResult) -> list[int]:
    """Layers per partition."""
    return [int(layers) for layers in result.row.balance.split("-")]


def _speed(result: RawResult | None) -> float:
    return result.row.throughput_samples_per_s or 0.0 if result and result.row.status == "ok" else 0.0
