"""Simulated cells, all in one process: PyTorch is loaded once and a model traced once for all of its variants."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.measure.host import host_facts
from gpipe_bench.models.table import parse_arguments
from gpipe_bench.suite.simulated_cells import SimulatedCell, VirtualCell
from gpipe_bench.suite.storage.raw import PEAKS, SHARES, RawResult
from gpipe_bench.util.processes import spread

if TYPE_CHECKING:
    from gpipe_bench.machine.profile import Profile as Hardware
    from gpipe_bench.results.rows import Row
    from gpipe_bench.simulator import DeviceUse, Step

# Of the host's facts those that decide a simulation; the same cell is the same row on every machine and day.
_FACTS: Final = ("commit", "dirty")

_PIECE: Final = 4
"""Cells that one process simulates before it takes others: all checkpoint modes of a micro-batch, in most sweeps."""


def simulation_facts() -> dict[str, Any]:
    """Columns of a simulated row that say by which code it was made; asks git, which takes a moment."""
    return {name: value for name, value in host_facts().items() if name in _FACTS}


def simulate_cells(
    cells: Iterable[SimulatedCell],
    report: Callable[[Row], None] | None = None,
    timelines: Container[str] | None = None,
    hardware: Hardware | None = None,
    facts: Mapping[str, Any] | None = None,
    *,
    processes: int = 1,
    steps: list[Step] | None = None,
) -> list[RawResult]:
    """Simulate cells; one that does not fit the memory is a row that says how much it needs.

    Cells that share partitions come one after the other, in one process; results are in the order of the cells, and
    the same whatever ``processes`` is.

    Args:
        cells: what to simulate.
        report: takes each row as it is made.
        timelines: ids of the cells whose timeline is kept; by default of all.
        hardware: what to simulate on in place of the cells' profile.
        facts: columns of the rows from :func:`simulation_facts`; found by default.
        processes: how many simulate at once; see :func:`gpipe_bench.util.processes.spread`.
        steps: takes each step, too, with its trace; with one process.

    Raises:
        BalanceError: a balance does not fit its model.
    """
    known = simulation_facts() if facts is None else facts
    given = list(cells)
    results: dict[int, RawResult] = {}

    def work(piece: Sequence[int]) -> list[RawResult]:
        found = []
        for cell in (given[place] for place in piece):
            balance: Sequence[int] = cell.balance or simulated_balance(cell)
            step = simulated_step(cell, balance, profile=hardware or cell.profile, keep_trace=steps is not None)
            if steps is not None:
                steps.append(step)
            timeline = timelines is None or cell.id in timelines
            found.append(step_result(cell, step, balance, simulated_columns(cell, known), timeline=timeline))
        return found

    pieces = _pieces(given)
    for piece, found in zip(pieces, spread(work, pieces, processes), strict=True):
        results |= zip(piece, found, strict=True)
        if report:
            for result in found:
                report(result.row)
    return [results[place] for place in range(len(given))]


def _pieces(cells: Sequence[SimulatedCell]) -> list[list[int]]:
    """Places of some cells that share partitions, the largest pipelines first: what is left at the end is short."""
    places = sorted(range(len(cells)), key=lambda place: _shared(cells[place]))
    shared = [list(some) for _, some in groupby(places, key=lambda place: _shared(cells[place]))]
    pieces = [some[k : k + _PIECE] for some in shared for k in range(0, len(some), _PIECE)]
    return sorted(pieces, key=lambda piece: -sum(cells[place].partitions * cells[place].chunks for place in piece))


def _shared(cell: SimulatedCell) -> tuple[str, str, int, float]:
    return cell.model, cell.model_args, cell.partitions, cell.batch_size / cell.chunks


def simulated_step(cell: SimulatedCell, balance: Sequence[int], **options: Any) -> Step:
    """A step of a cell; ``options``: arguments of :func:`gpipe_bench.simulator.simulate` beside those."""
    # Here and not above: the simulator loads PyTorch.
    from gpipe_bench.simulator import Model, simulate

    given = {**cell.arguments(), **options}
    given["devices"] = [cell.device_numbers[rank] for rank in cell.placement]
    return simulate(Model(cell.model, parse_arguments(cell.model, cell.model_args)), balance=balance, **given)


def simulated_columns(cell: SimulatedCell, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row beside those of its step; ``facts``: from :func:`simulation_facts`."""
    return {"flavour": cell.flavour, "repeat": 0, **facts}


def simulated_balance(cell: SimulatedCell) -> list[int]:
    """Layers per partition such that the slowest partition is as fast as it can be on the cell's profile.

    Raises:
        BalanceError: more partitions than layers.
        ConfigError: no such model or profile.
    """
    from gpipe_bench.balance import split_min_max

    network, hardware = (cell.model, cell.model_args), (cell.profile, cell.tf32, cell.launch_us)
    batch = cell.batch_size, cell.chunks
    times = _layer_times(network, hardware, batch, cell.checkpoint, precision=cell.precision)
    return split_min_max(times, cell.partitions)


@lru_cache(maxsize=256)
def _layer_times(
    network: tuple[str, str],
    hardware: tuple[str, bool | None, float | None],
    batch: tuple[int, int],
    checkpoint: str,
    *,
    precision: str,
) -> tuple[float, ...]:
    """Times of layers, kept for cells that share them."""
    from gpipe_bench.balance import layer_simulated_times
    from gpipe_bench.machine.profile import load_profile
    from gpipe_bench.simulator import Model

    (model, model_args), (profile, tf32, launch_us), (size, chunks) = network, hardware, batch
    known = Model(model, parse_arguments(model, model_args))
    options: dict[str, Any] = {"batch_size": size, "chunks": chunks, "checkpoint": checkpoint, "precision": precision}
    return tuple(layer_simulated_times(known, profile=load_profile(profile).adapted(tf32, launch_us), **options))


def step_result(
    cell: VirtualCell, step: Step, balance: Sequence[int], columns: Mapping[str, Any], *, timeline: bool
) -> RawResult:
    """The result of one step of a cell.

    Args:
        cell: the cell that was simulated or emulated.
        step: the step, or why there is none.
        balance: layers per partition.
        columns: further columns of the row.
        timeline: whether its timeline is kept.
    """
    row = step.row(config_sha256=cell.config_sha256, cell=cell.id, **columns)
    times = {"step_time_ms": step.step_time_ms, "throughput_samples_per_s": step.throughput_samples_per_s}
    steps = [{"step": 0, **times}] if step.step_time_ms is not None else []
    events = [event.to_dict() for event in step.events] if timeline else []
    device_of = [cell.device_numbers[rank] for rank in cell.placement]
    tables = device_records(step.devices, balance, device_of), steps, events
    needed = step.shortage.needed_gib if step.shortage else None
    return RawResult(cell.id, row, *tables, cell.configuration, step.bound_by_host, [*step.caveats], needed)


def device_records(uses: Iterable[DeviceUse], balance: Sequence[int], device_of: Sequence[int]) -> list[dict[str, Any]]:
    """The records of a table of devices; ``partition`` is empty where a device has several.

    Args:
        uses: of the devices of one step.
        balance: layers per partition.
        device_of: the device of each partition.
    """
    own = {use.device: [j for j, device in enumerate(device_of) if device == use.device] for use in uses}
    return [
        {
            "device_index": use.device,
            "partition": own[use.device][0] if len(own[use.device]) == 1 else None,
            "device": f"cuda:{use.device}",
            "layers": sum(balance[j] for j in own[use.device]),
            **{name: getattr(use, name) for name in (*PEAKS, *SHARES)},
        }
        for use in uses
    ]
