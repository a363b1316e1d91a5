"""The best balance, number of micro-batches and checkpoint mode for a model on a hardware profile, by simulation.

    every number of devices x chunks x checkpoint mode, balanced by the cost of the layers
        -> where those of a number of devices do not fit the memory, other balances that do
        -> the fastest that fits, and with its balance the other modes and chunks
        -> other numbers of chunks, the even balance, and balances that differ by one layer, as long as it helps

Everything that was tried is kept, so that what another choice costs can be said too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, product
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field

from gpipe_bench.bench.advice.fit import Fitter, balance_of, busy_shares
from gpipe_bench.bench.spec.problems import Problem
from gpipe_bench.bench.spec.settings import (
    BatchSize,
    Model,
    ModelArgs,
    ModelSection,
    Variant,
    cut_problems,
    no_boolean,
)
from gpipe_bench.bench.spec.simulated_cells import (
    Flavour,
    Hosts,
    Network,
    Optimizer,
    Profile,
    SimulatedCell,
    host_problems,
)
from gpipe_bench.bench.storage.raw import RawResult
from gpipe_bench.choices import CHECKPOINT_MODES
from gpipe_bench.errors import ConfigError
from gpipe_bench.simulator.hardware.networks import IDEAL, NETWORK

if TYPE_CHECKING:
    from gpipe_bench.results.rows import Row

_MOST_CHUNKS: Final = 128
_MOVES: Final = 12
_BOUNDLESS_GIB: Final = 1e9

Devices = Annotated[int, Field(strict=True, ge=1, le=64, description="devices there are; fewer may be used")]
Limit = Annotated[
    float, Field(ge=0, le=10**6, description="GiB for the tensors of a device; 0: all that it has for them"), no_boolean
]


class AdviceRequest(ModelSection):
    """What is to be trained where."""

    model: Model = "unet"
    model_args: ModelArgs = "depth=5;B=5;C=64;size=192"
    devices: Devices = 8
    hosts: Hosts = 1
    network: Network = NETWORK
    batch_size: BatchSize = 512
    memory_limit_gib: Limit = 0.0
    optimizer: Optimizer = "sgd"
    profile: Profile = "p40"
    flavour: Flavour = "current"
    variant: Variant = "dep-str-ptl"

    def problems(self) -> Iterator[Problem]:
        """The model is known and takes these arguments; the hosts have as many devices each."""
        yield from cut_problems(self, 1)
        yield from host_problems(self, self.devices, "direct")

    def candidates(self) -> list[SimulatedCell]:
        """A cell for each number of devices, chunks and checkpoint mode; balances are those of the layers' costs."""
        from gpipe_bench.models.table import MODELS, parse_arguments

        layers = MODELS[self.model].layers(parse_arguments(self.model, self.model_args))
        fitting = [n for n in range(1, min(self.devices, layers) + 1) if n % self.hosts_of(n) == 0]
        numbers = sorted({max(fitting), *(2**k for k in range(7) if 2**k in fitting)})
        chunks = [2**k for k in range(8) if 2**k <= min(self.batch_size, _MOST_CHUNKS)]
        return [
            self.cell(partitions=n, chunks=m, checkpoint=mode)
            for n, m, mode in product(numbers, chunks, CHECKPOINT_MODES)
        ]

    def hosts_of(self, partitions: int) -> int:
        """How many hosts so many partitions need."""
        return -(-partitions * self.hosts // self.devices)

    def cell(self, **settings: Any) -> SimulatedCell:
        """A cell of this request, on as few hosts as it needs."""
        hosts = self.hosts_of(settings["partitions"])
        return SimulatedCell.model_validate(
            {**self.shared(SimulatedCell), "balance": "auto", "hosts": hosts, **settings}
        )


@dataclass(slots=True)
class Advice:
    """The simulations of one request.

    Attributes:
        request: the request.
        limit_gib: that held on each device.
        results: all simulations, in the order in which they were made.
        ideal_samples_per_s: of :attr:`spread` with a network that takes no time; None where there is none.
    """

    request: AdviceRequest
    limit_gib: float
    results: list[RawResult] = field(default_factory=list)
    ideal_samples_per_s: float | None = None

    @property
    def best(self) -> RawResult | None:
        """The fastest; of equally fast ones the one with fewest devices, least memory; None where nothing fits."""
        good = [result for result in self.results if result.row.status == "ok"]
        return min(good, key=_rank, default=None)

    @property
    def spread(self) -> RawResult | None:
        """The fastest of those on several hosts; None where there is none."""
        good = [result for result in self.results if result.row.status == "ok"]
        across = [result for result in good if self.request.hosts_of(result.row.partitions or 1) > 1]
        return min(across, key=_rank, default=None)

    def alternatives(self) -> list[tuple[str, RawResult]]:
        """(what differs, the fastest of that kind): each other mode, number of devices, number of chunks, balance."""
        best = self.best
        if best is None:
            return []
        row, found = best.row, []
        for name, column in _KINDS.items():
            for value in sorted({getattr(r.row, column) for r in self.results} - {getattr(row, column)}):
                same = [k for k in ("partitions", "chunks", "checkpoint") if k != column and column == "balance"]
                group = [r for r in self.results if getattr(r.row, column) == value]
                group = [r for r in group if all(getattr(r.row, k) == getattr(row, k) for k in same)]
                if group:
                    found.append((f"{name} {value}", min(group, key=_rank)))
        return found


_KINDS: Final = {"checkpoint": "checkpoint", "devices": "partitions", "chunks": "chunks", "balance": "balance"}


def advise(request: AdviceRequest, report: Callable[[int, int], None] | None = None, processes: int = 1) -> Advice:
    """Find the fastest pipeline that fits the memory.

    Args:
        request: model, batch and hardware.
        report: takes how many of how many first candidates are done.
        processes: how many simulate those at once; see :func:`gpipe_bench.util.processes.spread`.

    Raises:
        ConfigError: the limit leaves no memory at all.
    """
    from gpipe_bench.bench.running.simulated import simulate_cells, simulation_facts
    from gpipe_bench.simulator.hardware.profile import load_profile

    hardware = load_profile(request.profile)
    own = hardware.memory_gib - hardware.context_gib
    limit = min(request.memory_limit_gib or own, own)
    hardware = hardware.model_copy(update={"memory_gib": limit + hardware.context_gib})
    if limit <= 0:
        raise ConfigError([f"memory_limit_gib must be more than 0, got {limit:g}; raise it"])
    advice = Advice(request, limit)
    cells, facts = request.candidates(), simulation_facts()
    done = count(1)

    def tell(_: Row) -> None:
        if report:
            report(next(done), len(cells))

    def simulate(cell: SimulatedCell) -> RawResult:
        (result,) = simulate_cells([cell], timelines=(), hardware=hardware, facts=facts)
        advice.results.append(result)
        return result

    def probe(cell: SimulatedCell) -> RawResult:
        (result,) = simulate_cells([cell], timelines=(), hardware=boundless, facts=facts)
        return result

    boundless = hardware.model_copy(update={"memory_gib": _BOUNDLESS_GIB})
    advice.results += simulate_cells(cells, tell, timelines=(), hardware=hardware, facts=facts, processes=processes)
    fitter = Fitter(limit, simulate, probe)
    fitter.fit_all(list(zip(cells, advice.results, strict=True)))
    _vary_fitted(advice, simulate)
    _refine(advice, simulate, fitter.fit)
    if spread := advice.spread:
        names = ("partitions", "chunks", "checkpoint", "balance")
        ideal = request.cell(**{name: getattr(spread.row, name) for name in names}, network=IDEAL)
        (result,) = simulate_cells([ideal], timelines=(), hardware=hardware, facts=facts)
        advice.ideal_samples_per_s = result.row.throughput_samples_per_s
    return advice


def _refine(
    advice: Advice,
    simulate: Callable[[SimulatedCell], RawResult],
    fit: Callable[[SimulatedCell], None],
) -> None:
    """Other numbers of chunks beside the best, then balances, one layer at a time."""
    best = advice.best
    if best is None:
        return
    row = best.row
    beside = {(row.chunks or 1) * 3 // 4, (row.chunks or 1) * 3 // 2}
    for chunks in sorted(beside - {row.chunks, 0}):
        if chunks <= advice.request.batch_size:
            cell = advice.request.cell(partitions=row.partitions, chunks=chunks, checkpoint=row.checkpoint)
            if simulate(cell).row.status == "oom" and cell.partitions > 1:
                fit(cell)
    best = advice.best or best
    row, n = best.row, best.row.partitions or 1
    balance = balance_of(best)
    total = sum(balance)
    tried = {tuple(balance)}
    queue = [[total // n + (j < total % n) for j in range(n)], *_moves(best, balance)]
    for _ in range(_MOVES):
        queue = [other for other in queue if tuple(other) not in tried and min(other) > 0]
        if not queue:
            return
        other = queue.pop(0)
        tried.add(tuple(other))
        settings = {"partitions": n, "chunks": row.chunks, "checkpoint": row.checkpoint, "balance": other}
        result = simulate(advice.request.cell(**settings))
        if advice.best is result:
            queue = _moves(result, other)


def _vary_fitted(advice: Advice, simulate: Callable[[SimulatedCell], RawResult]) -> None:
    """The other modes and numbers of chunks with the balance of the best, where the balance by time did not fit it."""
    best = advice.best
    if best is None:
        return
    row = best.row
    setting = {"partitions": row.partitions, "chunks": row.chunks, "checkpoint": row.checkpoint}
    if not any(
        result.row.status == "oom" and all(getattr(result.row, name) == value for name, value in setting.items())
        for result in advice.results
    ):
        return
    balance = balance_of(best)
    chunks = {result.row.chunks for result in advice.results if result.row.partitions == row.partitions}
    others: list[dict[str, Any]] = [{"checkpoint": mode} for mode in CHECKPOINT_MODES if mode != row.checkpoint]
    others += [{"chunks": m} for m in sorted(m for m in chunks if m and m != row.chunks)]
    known = {result.cell for result in advice.results}
    for other in others:
        cell = advice.request.cell(**{**setting, **other, "balance": balance})
        if cell.id not in known:
            simulate(cell)


def _moves(result: RawResult, balance: list[int]) -> list[list[int]]:
    """Balances in which a neighbour of the busiest partition takes one of its layers, or one of another of it."""
    busy = busy_shares(result)
    ranked = sorted(range(len(busy)), key=lambda j: -busy[j])[:2]
    found = []
    for j in ranked:
        for k in (j - 1, j + 1):
            if 0 <= k < len(balance):
                other = list(balance)
                other[j], other[k] = other[j] - 1, other[k] + 1
                found.append(other)
    return found


def _rank(result: RawResult) -> tuple[float, int, float]:
    row = result.row
    return -(row.throughput_samples_per_s or 0.0), row.partitions or 1, row.peak_reserved_gib or 0.0
