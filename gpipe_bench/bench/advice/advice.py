"""The best balance, micro-batches, checkpoint mode and schedule for a model on a hardware profile, by simulation.

    every number of devices x chunks x checkpoint mode x schedule, balanced by the cost of the layers
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

from pydantic import BeforeValidator, Field

from gpipe_bench.bench.advice.fit import Fitter, balance_of, busy_shares
from gpipe_bench.bench.spec.settings import (
    BatchSize,
    Model,
    ModelArgs,
    ModelSection,
    Problem,
    Variant,
    cut_problems,
    no_boolean,
)
from gpipe_bench.bench.spec.simulated_cells import (
    Flavour,
    Hosts,
    LaunchUs,
    Network,
    Optimizer,
    Profile,
    SimulatedCell,
    Tf32,
    host_problems,
)
from gpipe_bench.bench.storage.raw import RawResult
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.measured import is_layers_file
from gpipe_bench.results.labels import run_as
from gpipe_bench.schedules.table import SCHEDULES, ScheduleName, device_count, partition_count
from gpipe_bench.simulator.hardware.networks import IDEAL, NETWORK
from gpipe_bench.util.choices import CHECKPOINT_MODES

if TYPE_CHECKING:
    from gpipe_bench.results.rows import Row

_MOST_CHUNKS: Final = 128
_MOVES: Final = 12
_BOUNDLESS_GIB: Final = 1e9

Devices = Annotated[int, Field(strict=True, ge=1, le=64, description="devices there are; fewer may be used")]


def _names(value: Any) -> Any:
    if isinstance(value, str):
        return SCHEDULES if value == "all" else tuple(word for word in value.split(",") if word)
    return tuple(value) if isinstance(value, list) else value


Schedules = Annotated[
    tuple[ScheduleName, ...],
    BeforeValidator(_names),
    Field(max_length=len(SCHEDULES), description="schedules to try beside the paper's executor, joined by ','; or all"),
]
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
    tf32: Tf32 = None
    launch_us: LaunchUs = None
    flavour: Flavour = "current"
    variant: Variant = "dep-str-ptl"
    schedules: Schedules = ()

    def problems(self) -> Iterator[Problem]:
        """The model is known and takes these arguments; the hosts have as many devices each."""
        yield from cut_problems(self, 1)
        if is_layers_file(self.model):
            text = "must be a model that micro-batches of any size go through, got the times of one size"
            yield Problem(("model",), f"{text}; use simulate --layers")
        yield from host_problems(self, self.devices, "direct")

    def candidates(self) -> list[SimulatedCell]:
        """A cell for each number of devices, chunks, checkpoint mode and schedule, balanced by the layers' costs."""
        from gpipe_bench.models.table import MODELS, parse_arguments

        layers = MODELS[self.model].layers(parse_arguments(self.model, self.model_args))
        fitting = [n for n in range(1, min(self.devices, layers) + 1) if n % self.hosts_of(n) == 0]
        numbers = sorted({max(fitting), *(2**k for k in range(7) if 2**k in fitting)})
        chunks = [2**k for k in range(8) if 2**k <= min(self.batch_size, _MOST_CHUNKS)]
        return [
            self.cell(partitions=n, chunks=m, checkpoint=mode, schedule=name)
            for name in (None, *self.schedules)
            for p, m, mode in product(numbers, chunks, CHECKPOINT_MODES)
            if (n := partition_count(name, p)) <= layers
        ]

    def hosts_of(self, devices: int) -> int:
        """How many hosts so many devices need."""
        return -(-devices * self.hosts // self.devices)

    def cell(self, **settings: Any) -> SimulatedCell:
        """A cell of this request, on as few hosts as it needs."""
        hosts = self.hosts_of(device_count(settings.get("schedule"), settings["partitions"]))
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
        across = [result for result in good if self.request.hosts_of(result.row.device_count or 1) > 1]
        return min(across, key=_rank, default=None)

    def alternatives(self) -> list[tuple[str, RawResult]]:
        """(what differs, the fastest of that kind): each other schedule, mode, number of devices or chunks, balance."""
        best = self.best
        if best is None:
            return []
        row, found = best.row, []
        for kind, value_of in _KINDS.items():
            for value in sorted({value_of(r.row) for r in self.results} - {value_of(row)}):
                group = [r for r in self.results if value_of(r.row) == value]
                if kind == "balance":
                    same = [name for name in _KINDS if name != kind]
                    group = [r for r in group if all(_KINDS[name](r.row) == _KINDS[name](row) for name in same)]
                if group:
                    found.append((f"{kind} {value}", min(group, key=_rank)))
        return found

    @property
    def runner_up(self) -> RawResult | None:
        """The fastest with another schedule than the best; None where there is none."""
        best = self.best
        others = [r for r in self.results if r.row.status == "ok" and best and run_as(r.row) != run_as(best.row)]
        return min(others, key=_rank, default=None)


_KINDS: Final[dict[str, Callable[[Row], Any]]] = {
    "schedule": run_as,
    "checkpoint": lambda row: row.checkpoint,
    "devices": lambda row: row.device_count,
    "chunks": lambda row: row.chunks,
    "balance": lambda row: row.balance,
}


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
    # Balances that fit are looked for with the paper's executor alone.
    pairs = zip(cells, advice.results, strict=True)
    fitter.fit_all([(cell, result) for cell, result in pairs if cell.schedule is None])
    _vary_fitted(advice, simulate)
    _refine(advice, simulate, fitter.fit)
    if spread := advice.spread:
        ideal = request.cell(**_setting(spread.row), balance=spread.row.balance, network=IDEAL)
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
        if chunks > advice.request.batch_size:
            continue
        cell = advice.request.cell(**{**_setting(row), "chunks": chunks})
        # A batch cannot be cut into any number of micro-batches; another number may be known.
        exact = cell.microbatches == chunks
        if exact and simulate(cell).row.status == "oom" and cell.partitions > 1 and cell.schedule is None:
            fit(cell)
    best = advice.best or best
    row, n = best.row, best.row.partitions or 1
    balance = balance_of(best)
    total = sum(balance)
    tried = {tuple(balance)}
    if row.device_count != n:  # shares of time are those of devices, not of partitions
        return
    queue = [[total // n + (j < total % n) for j in range(n)], *_moves(best, balance)]
    for _ in range(_MOVES):
        queue = [other for other in queue if tuple(other) not in tried and min(other) > 0]
        if not queue:
            return
        other = queue.pop(0)
        tried.add(tuple(other))
        result = simulate(advice.request.cell(**_setting(row), balance=other))
        if advice.best is result:
            queue = _moves(result, other)


def _vary_fitted(advice: Advice, simulate: Callable[[SimulatedCell], RawResult]) -> None:
    """The other modes and numbers of chunks with the balance of the best, where the balance by time did not fit it."""
    best = advice.best
    if best is None:
        return
    row = best.row
    setting = _setting(row)
    if not any(result.row.status == "oom" and _setting(result.row) == setting for result in advice.results):
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


def _setting(row: Row) -> dict[str, Any]:
    """What a row says of its cell but the balance."""
    schedule = row.schedule if row.backward == "scheduled" else None
    found = {"partitions": row.partitions, "chunks": row.chunks, "checkpoint": row.checkpoint}
    return {**found, "schedule": schedule}


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
    return -(row.throughput_samples_per_s or 0.0), row.device_count or 1, row.peak_reserved_gib or 0.0
