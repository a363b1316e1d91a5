"""Simulated cells, all in one process: PyTorch is loaded once and a model traced once for all of its variants."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.bench.raw import RawResult
from gpipe_bench.bench.simulated_cells import SimulatedCell
from gpipe_bench.measure.host import host_facts
from models.table import parse_arguments

if TYPE_CHECKING:
    from gpipe_bench.rows import Row
    from gpipe_bench.simulator import DeviceUse, Simulation
    from gpipe_bench.simulator.hardware import Profile as Hardware

__all__ = ["device_records", "simulate_cells", "simulation_facts"]

# Of the host's facts those that decide a simulation; the same cell is the same row on every machine and day.
_FACTS: Final = ("commit", "dirty")


def simulation_facts() -> dict[str, Any]:
    """Columns of a simulated row that say by which code it was made; asks git, which takes a moment."""
    return {name: value for name, value in host_facts().items() if name in _FACTS}


def simulate_cells(
    cells: Iterable[SimulatedCell],
    report: Callable[[Row], None] | None = None,
    timelines: Container[str] | None = None,
    hardware: Hardware | None = None,
    facts: Mapping[str, Any] | None = None,
) -> list[RawResult]:
    """Simulate cells; one that does not fit the memory is a row that says how much it needs.

    Cells that share partitions come one after the other; results are in the order of the cells.

    Args:
        cells: what to simulate.
        report: takes each row as it is made.
        timelines: ids of the cells whose timeline is kept; by default of all.
        hardware: what to simulate on in place of the cells' profile.
        facts: columns of the rows from :func:`simulation_facts`; found by default.

    Raises:
        BalanceError: a balance does not fit its model.
    """
    known = simulation_facts() if facts is None else facts
    given = list(cells)
    results: dict[int, RawResult] = {}
    for place, cell in sorted(enumerate(given), key=lambda item: _by_partitions(item[1])):
        timeline = timelines is None or cell.id in timelines
        results[place] = _simulated(cell, known, hardware or cell.profile, timeline=timeline)
        if report:
            report(results[place].row)
    return [results[place] for place in range(len(given))]


def _by_partitions(cell: SimulatedCell) -> tuple[str, str, int, float]:
    return cell.model, cell.model_args, cell.partitions, cell.batch_size / cell.chunks


def _simulated(cell: SimulatedCell, facts: Mapping[str, Any], hardware: Hardware | str, *, timeline: bool) -> RawResult:
    # Here and not above: the simulator loads PyTorch.
    from gpipe_bench.bench.layer_costs import simulated_balance
    from gpipe_bench.simulator import Model, simulate

    balance: Sequence[int] = cell.balance or simulated_balance(cell)
    step = simulate(
        Model(cell.model, parse_arguments(cell.model, cell.model_args)),
        balance=balance,
        batch_size=cell.batch_size,
        chunks=cell.chunks,
        checkpoint=cell.checkpoint,
        components=cell.components,
        backward=cell.backward,
        transfer=cell.transfer,
        optimizer=cell.optimizer,
        profile=hardware,
        flavour=cell.flavour,
    )
    own = {"flavour": cell.flavour, "repeat": 0, "config_sha256": cell.config_sha256}
    row = step.row(**own, **facts)
    events = [event.to_dict() for event in step.events] if timeline else []
    return RawResult(cell.id, row, device_records(step.devices, balance), _steps(step), events)


def device_records(uses: Iterable[DeviceUse], balance: Sequence[int]) -> list[dict[str, Any]]:
    """The records of a table of devices.

    Args:
        uses: of the devices of one step.
        balance: layers of each.
    """
    return [
        {
            "partition": use.device,
            "device": f"cuda:{use.device}",
            "layers": balance[use.device],
            "peak_allocated_gib": use.peak_allocated_gib,
            "peak_reserved_gib": use.peak_reserved_gib,
            "compute_fraction": use.compute_fraction,
            "recompute_fraction": use.recompute_fraction,
            "copy_fraction": use.copy_fraction,
            "imbalance_fraction": use.imbalance_fraction,
            "bubble_fraction": use.bubble_fraction,
            "utilization_fraction": use.utilization_fraction,
        }
        for use in uses
    ]


def _steps(step: Simulation) -> list[dict[str, Any]]:
    if step.step_time_ms is None:
        return []
    values = {"step_time_ms": step.step_time_ms, "throughput_samples_per_s": step.throughput_samples_per_s}
    return [{"step": 0, **values}]
