"""The best balance, micro-batches, checkpoint mode and schedule for a model on a hardware profile, by simulation.

    the paper's executor: every number of devices x chunks x checkpoint mode, balanced by the cost of the layers
        -> every schedule on as many devices as may be faster; with checkpoints where it does not fit without
        -> other balances of all of these that may be the fastest, as long as they fit better or are faster
        -> beside the fastest: other numbers of chunks, other modes, the even balance

Everything that was tried is kept, so that what another choice costs can be said too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, product
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

from pydantic import PlainSerializer

from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.networks import IDEAL, NETWORK
from gpipe_bench.models.measured import is_layers_file
from gpipe_bench.results.labels import run_as
from gpipe_bench.schedules.table import SCHEDULES, ScheduleName, device_count, partition_count
from gpipe_bench.settings import CHECKPOINT_MODES, BatchSize, Hosts, Setting, number, whole
from gpipe_bench.step.request import Flavour, LaunchUs, Optimizer, Precision, Tf32
from gpipe_bench.suite.advice.fit import Search, balance_of
from gpipe_bench.suite.cells import cut_problems
from gpipe_bench.suite.settings import (
    Model,
    ModelArgs,
    ModelSection,
    Problem,
    Variant,
)
from gpipe_bench.suite.simulated_cells import (
    Network,
    Profile,
    SimulatedCell,
    host_problems,
)
from gpipe_bench.suite.storage.raw import RawResult

if TYPE_CHECKING:
    from gpipe_bench.results.rows import Row

_MOST_CHUNKS: Final = 128
_MARGIN: Final = 1.05
_EFFORT: Final = 30_000
_BOUNDLESS_GIB: Final = 1e9

Devices = Annotated[int, whole("devices there are; fewer may be used", most=64)]


def _names(value: Any) -> Any:
    if isinstance(value, str):
        known = {"all": SCHEDULES, "none": ()}
        return known[value] if value in known else tuple(word for word in value.split(",") if word)
    return tuple(value) if isinstance(value, list) else value


Schedules = Annotated[
    tuple[ScheduleName, ...],
    Setting(
        "schedules to try beside the paper's executor, joined by ','; all, or none",
        _names,
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"enum": list(SCHEDULES)}}]},
    ),
    PlainSerializer(lambda names: "all" if names == SCHEDULES else names),
]
Limit = Annotated[
    float, number("GiB for the tensors of a device; 0: all that it has for them", 10**6, "GiB", zero=True)
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
    precision: Precision = "float32"
    profile: Profile = "p40"
    tf32: Tf32 = None
    launch_us: LaunchUs = None
    flavour: Flavour = "current"
    variant: Variant = "dep-str-ptl"
    schedules: Schedules = get_args(ScheduleName)

    def problems(self) -> Iterator[Problem]:
        """The model is known and takes these arguments; the hosts have as many devices each."""
        yield from cut_problems(self, 1)
        if is_layers_file(self.model):
            text = "must be a model that micro-batches of any size go through, got the times of one size"
            yield Problem(("model",), f"{text}; use simulate --layers")
        yield from host_problems(self, self.devices, "direct")

    @cached_property
    def layers(self) -> int:
        """How many layers the model has."""
        from gpipe_bench.models.table import MODELS, parse_arguments

        return MODELS[self.model].layers(parse_arguments(self.model, self.model_args))

    def candidates(self) -> list[SimulatedCell]:
        """The paper's executor for each number of devices, chunks and mode, balanced by the layers' costs."""
        fitting = [n for n in range(1, min(self.devices, self.layers) + 1) if n % self.hosts_of(n) == 0]
        numbers = sorted({max(fitting), *(2**k for k in range(7) if 2**k in fitting)})
        chunks = [2**k for k in range(8) if 2**k <= min(self.batch_size, _MOST_CHUNKS)]
        return [
            self.cell(partitions=p, chunks=m, checkpoint=mode)
            for p, m, mode in product(numbers, chunks, CHECKPOINT_MODES)
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
    def fastest(self) -> float:
        """Samples per second of the best; 0 where nothing fits."""
        return _speed(self.best) if self.best else 0.0

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
        report: takes how many of how many candidates are done; schedules add some.
        processes: how many simulate those at once; see :func:`gpipe_bench.util.processes.spread`.

    Raises:
        ConfigError: the limit leaves no memory at all.
    """
    from gpipe_bench.machine.profile import load_profile
    from gpipe_bench.suite.running.simulated import simulate_cells, simulation_facts

    hardware = load_profile(request.profile)
    own = hardware.memory_gib - hardware.context_gib
    limit = min(request.memory_limit_gib or own, own)
    hardware = hardware.model_copy(update={"memory_gib": limit + hardware.context_gib})
    boundless = hardware.model_copy(update={"memory_gib": _BOUNDLESS_GIB})
    if limit <= 0:
        raise ConfigError([f"memory_limit_gib must be more than 0, got {limit:g}; raise it"])
    advice, facts = Advice(request, limit), simulation_facts()
    known: dict[str, RawResult] = {}
    done = count(1)
    tell = report or (lambda _done, _total: None)

    def simulate_all(cells: list[SimulatedCell]) -> None:
        total = len(advice.results) + len(cells)
        options: dict[str, Any] = {"timelines": (), "hardware": hardware, "facts": facts, "processes": processes}
        advice.results += simulate_cells(cells, lambda _: tell(next(done), total), **options)
        tried.update((cell.id, cell) for cell in cells)
        known.update((result.cell, result) for result in advice.results)

    def simulate(cell: SimulatedCell) -> RawResult:
        if cell.id not in known:
            (known[cell.id],) = simulate_cells([cell], timelines=(), hardware=hardware, facts=facts)
            advice.results.append(known[cell.id])
        return known[cell.id]

    def probe(cell: SimulatedCell) -> RawResult:
        (result,) = simulate_cells([cell], timelines=(), hardware=boundless, facts=facts)
        return result

    tried: dict[str, SimulatedCell] = {}
    cells = request.candidates()
    simulate_all(cells)
    # So many devices are at most so many times as fast as one that has all the memory in the world.
    alone = max(_speed(probe(cell)) for cell in cells if (cell.partitions, cell.checkpoint) == (1, "never"))
    for mode in reversed(CHECKPOINT_MODES):
        simulate_all(_scheduled(advice, cells, mode, alone))
    search = Search(limit, simulate, probe, _EFFORT)
    search.improve([(cell, known[cell.id]) for cell in tried.values()], advice.fastest)
    beside = [(cell, simulate(cell)) for cell in _chunks_beside(advice)]
    search.improve(beside, advice.fastest)
    for cell in _beside_best(advice):
        simulate(cell)
    if spread := advice.spread:
        ideal = probe(request.cell(**_setting(spread.row), balance=spread.row.balance, network=IDEAL))
        advice.ideal_samples_per_s = ideal.row.throughput_samples_per_s
    return advice


def _scheduled(advice: Advice, cells: list[SimulatedCell], mode: str, alone: float) -> list[SimulatedCell]:
    """The cells of schedules in a mode that may be faster than all so far.

    Args:
        advice: the results so far. The paper's executor and the modes that recompute less are among them.
        cells: of the paper's executor.
        mode: of checkpoints.
        alone: samples per second that no device is faster than.
    """
    request = advice.request
    good = [result.row for result in advice.results if result.row.status == "ok"]
    fits = {(row.schedule, row.partitions, row.chunks) for row in good if row.backward == "scheduled"}
    found = []
    for name, (p, m) in product(request.schedules, dict.fromkeys((cell.partitions, cell.chunks) for cell in cells)):
        n = partition_count(name, p)
        # Recomputing takes longer, so a setting that fits without is not tried with it.
        if n <= request.layers and p * alone * _MARGIN > advice.fastest and (name, n, m) not in fits:
            found.append(request.cell(partitions=n, chunks=m, checkpoint=mode, schedule=name))
    return found


def _chunks_beside(advice: Advice) -> list[SimulatedCell]:
    """The best with other numbers of chunks, between those that were tried."""
    best = advice.best
    if best is None:
        return []
    chunks = best.row.chunks or 1
    wanted = sorted({chunks * 3 // 4, chunks * 3 // 2} - {chunks, 0})
    cells = [
        advice.request.cell(**{**_setting(best.row), "chunks": m}) for m in wanted if m <= advice.request.batch_size
    ]
    # A batch cannot be cut into any number of micro-batches; another number may be known.
    return [cell for cell in cells if cell.microbatches == cell.chunks]


def _beside_best(advice: Advice) -> list[SimulatedCell]:
    """The even balance, and the other modes and numbers of chunks with the balance of the best."""
    best = advice.best
    if best is None:
        return []
    setting, balance, n = _setting(best.row), balance_of(best), best.row.partitions or 1
    chunks = {r.row.chunks for r in advice.results if r.row.partitions == n} - {best.row.chunks}
    others: list[dict[str, Any]] = [{"checkpoint": mode} for mode in CHECKPOINT_MODES if mode != best.row.checkpoint]
    others += [{"chunks": m} for m in sorted(m for m in chunks if m)]
    total = sum(balance)
    even = [total // n + (j < total % n) for j in range(n)]
    return [advice.request.cell(**{**setting, "balance": balance, **other}) for other in (*others, {"balance": even})]


def _setting(row: Row) -> dict[str, Any]:
    """What a row says of its cell but the balance."""
    schedule = row.schedule if row.backward == "scheduled" else None
    found = {"partitions": row.partitions, "chunks": row.chunks, "checkpoint": row.checkpoint}
    return {**found, "schedule": schedule}


def _speed(result: RawResult) -> float:
    return result.row.throughput_samples_per_s or 0.0


def _rank(result: RawResult) -> tuple[float, int, float]:
    row = result.row
    return -(row.throughput_samples_per_s or 0.0), row.device_count or 1, row.peak_reserved_gib or 0.0
