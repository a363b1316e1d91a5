"""Balances that fit a memory which the balance by time breaks, and the fastest of those found.

    the fullest partition needs more than there is
        -> layers move off it, by steps that shrink, as long as the devices lack less than before
    all fit
        -> layers move off the busiest partition, as long as that is faster and all still fit

What a balance needs is known from a simulation without limit; one with the limit confirms what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gpipe_bench.bench.spec.simulated_cells import SimulatedCell
    from gpipe_bench.bench.storage.raw import RawResult

_PROBES: Final = 8
"""Simulations without limit to fit one cell, and as many to make it faster."""

_PER_DEVICES: Final = 32
"""Simulations without limit for all cells of one number of devices."""


@dataclass(slots=True)
class Fitter:
    """Looks for balances that fit.

    Attributes:
        limit_gib: for the tensors of each device.
        simulate: with the limit; keeps what it made.
        probe: without limit.
    """

    limit_gib: float
    simulate: Callable[[SimulatedCell], RawResult]
    probe: Callable[[SimulatedCell], RawResult]
    _left: int = field(default=0, init=False)
    _seen: dict[str, RawResult] = field(default_factory=dict, init=False)
    _kept: dict[str, RawResult] = field(default_factory=dict, init=False)

    def fit_all(self, candidates: Sequence[tuple[SimulatedCell, RawResult]]) -> None:
        """Fit the cells of each number of devices that may be faster than all of that number that fit.

        Args:
            candidates: cells and what came of them with the limit; those of one number of devices side by side.
        """
        wanted = worth_fitting(candidates, self.limit_gib)
        for devices, group in groupby(wanted, key=lambda cell: cell.partitions):
            fitting = [_speed(result) for cell, result in candidates if cell.partitions == devices]
            self._fit_group(list(group), max(fitting))

    def _fit_group(self, cells: list[SimulatedCell], fastest: float) -> None:
        self._left = _PER_DEVICES
        # What the balance by time gives with all the memory in the world, no other is much faster than.
        free = [(self._free(cell), cell) for cell in cells[:_PER_DEVICES]]
        found: RawResult | None = None
        failed: dict[int, float] = {}
        # Those that failed are tried again from a balance that fits another.
        order = sorted(free, key=lambda pair: -_speed(pair[0]))
        for result, cell in [*order, *order]:
            if self._left <= 0 or _speed(result) <= max(fastest, _speed(found)):
                continue
            start = self._free(cell, balance_of(found)) if found else result
            lack = min(self._lack(cell, result), self._lack(cell, start))
            if failed.get(cell.chunks, lack + 1) <= lack:
                continue
            fitted = self._from(cell, start if self._lack(cell, start) <= lack else result)
            if fitted is None:
                failed[cell.chunks] = lack
            elif _speed(fitted) > _speed(found):
                found = fitted

    def fit(self, cell: SimulatedCell) -> None:
        """Fit one cell that does not, and make it faster."""
        self._left = 2 * _PROBES
        self._from(cell, self._free(cell))

    def _from(self, cell: SimulatedCell, start: RawResult) -> RawResult | None:
        """The fastest balance found that fits, None where none was; begins at the result of a balance."""
        found = self._walk(cell, start, lambda result: self._lack(cell, result), _fullest)
        if self._lack(cell, found) > 0:
            return None

        def slowness(result: RawResult) -> float:
            faster = _speed(result) > _speed(found) and self._lack(cell, result) <= 0
            return -_speed(result) if faster or result is found else 0.0

        return self._limited(cell, self._walk(cell, found, slowness, busy_shares))

    def _walk(
        self,
        cell: SimulatedCell,
        start: RawResult,
        cost: Callable[[RawResult], float],
        heaviest: Callable[[RawResult], list[float]],
    ) -> RawResult:
        """Move layers off the heaviest partition while the cost falls; half as many where it does not."""
        best, lowest = start, cost(start)
        most = self._left - _PROBES
        step = max(balance_of(best)) // 4
        while step and lowest != 0:
            tried = []
            for balance in _shifted(balance_of(best), heaviest(best), step):
                if self._left > max(most, 0):
                    result = self._free(cell, balance)
                    tried.append((cost(result), result))
            value, result = min(tried, key=lambda pair: pair[0], default=(lowest, best))
            if value < lowest:
                best, lowest = result, value
            else:
                step //= 2
        return best

    def _free(self, cell: SimulatedCell, balance: Sequence[int] = ()) -> RawResult:
        """A simulation without limit, by the cell's own balance or another; each is made once."""
        asked = cell.changed(balance=balance) if balance else cell
        if asked.id not in self._seen:
            self._left -= 1
            self._seen[asked.id] = self.probe(asked)
        return self._seen[asked.id]

    def _lack(self, cell: SimulatedCell, result: RawResult) -> float:
        """GiB that the tensors lack on all devices; next to none where only the allocator lacks some; 0 if it fits."""
        lack = sum(max(0.0, gib - self.limit_gib) for gib in _fullest(result))
        if lack > 0 or self._limited(cell, result).row.status == "ok":
            return lack
        reserved: float = sum(record["peak_reserved_gib"] for record in result.devices)
        return 1e-6 * reserved

    def _limited(self, cell: SimulatedCell, free: RawResult) -> RawResult:
        """The same as a simulation without limit, with it; each is made once."""
        exact = cell.changed(balance=balance_of(free))
        if exact.id not in self._kept:
            self._kept[exact.id] = self.simulate(exact)
        return self._kept[exact.id]


def worth_fitting(candidates: Sequence[tuple[SimulatedCell, RawResult]], limit_gib: float) -> list[SimulatedCell]:
    """Cells that do not fit by time, could by another balance, and may then be the fastest of their number of devices.

    Left out is what needs more than all devices have together, judged by one device that does the same; and numbers of
    chunks beyond one that fits and is slower than another still, for throughput rises with chunks and then falls.

    Args:
        candidates: cells and what came of them.
        limit_gib: for the tensors of each device.
    """
    alone = {(c.chunks, c.checkpoint): needed_gib(r) for c, r in candidates if c.partitions == 1}
    found = []
    for cell, result in candidates:
        all_of_it = alone.get((cell.chunks, cell.checkpoint), 0.0)
        if result.row.status != "oom" or cell.partitions == 1 or all_of_it > cell.partitions * limit_gib:
            continue
        alike = [
            (other.chunks, _speed(r))
            for other, r in candidates
            if (other.partitions, other.checkpoint, r.row.status) == (cell.partitions, cell.checkpoint, "ok")
        ]
        top = max(alike, key=lambda pair: pair[1], default=(cell.chunks, 0.0))[0]
        low, high = sorted((cell.chunks, top))
        if not any(low < chunks < high for chunks, _ in alike):
            found.append(cell)
    return found


def needed_gib(result: RawResult) -> float:
    """GiB that the full device needs, or the allocated GiB if all fits; 0 if not known."""
    return result.needed_gib or result.row.peak_allocated_gib or 0.0


def busy_shares(result: RawResult) -> list[float]:
    """Share of a step that each device computes, recomputation with it."""
    return [record["compute_fraction"] + record["recompute_fraction"] for record in result.devices]


def _fullest(result: RawResult) -> list[float]:
    return [record["peak_allocated_gib"] for record in result.devices]


def _shifted(balance: list[int], weights: list[float], step: int) -> Iterator[list[int]]:
    """Balances in which ``step`` layers leave the heaviest: on to the lightest through those between, to neighbours."""
    heavy = max(range(len(weights)), key=lambda j: weights[j])
    light = min(range(len(weights)), key=lambda j: weights[j])
    for target in dict.fromkeys((light, heavy - 1, heavy + 1)):
        if 0 <= target < len(balance) and target != heavy and balance[heavy] > step:
            other = list(balance)
            other[heavy], other[target] = other[heavy] - step, other[target] + step
            yield other


def balance_of(result: RawResult) -> list[int]:
    """Layers per partition."""
    return [int(layers) for layers in result.row.balance.split("-")]


def _speed(result: RawResult | None) -> float:
    return result.row.throughput_samples_per_s or 0.0 if result and result.row.status == "ok" else 0.0
