"""Simulated cells, all in one process: PyTorch is loaded once and a model traced once for all of its variants."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gpipe_bench.bench.raw import RawResult
from gpipe_bench.bench.simulated_cells import SimulatedCell
from gpipe_bench.measure.host import host_facts
from models.table import parse_arguments

if TYPE_CHECKING:
    from gpipe_bench.rows import Row
    from gpipe_bench.simulator import Simulation

__all__ = ["simulate_cells"]

# Of the host's facts those that decide a simulation; the same cell is the same row on every machine and day.
_FACTS = ("commit", "dirty")


def simulate_cells(cells: Iterable[SimulatedCell], report: Callable[[Row], None] | None = None) -> list[RawResult]:
    """Simulate cells in order; one that does not fit the memory is a row that says how much it needs.

    Args:
        cells: what to simulate.
        report: takes each row as it is made.

    Raises:
        BalanceError: a balance does not fit its model.
    """
    facts = {name: value for name, value in host_facts().items() if name in _FACTS}
    results = []
    for cell in cells:
        results.append(_simulated(cell, facts))
        if report:
            report(results[-1].row)
    return results


def _simulated(cell: SimulatedCell, facts: dict[str, Any]) -> RawResult:
    # Here and not above: the simulator loads PyTorch.
    from gpipe_bench.simulator import Model, simulate

    step = simulate(
        Model(cell.model, parse_arguments(cell.model, cell.model_args)),
        balance=cell.balance,
        batch_size=cell.batch_size,
        chunks=cell.chunks,
        checkpoint=cell.checkpoint,
        components=cell.components,
        backward=cell.backward,
        transfer=cell.transfer,
        optimizer=cell.optimizer,
        profile=cell.profile,
        flavour=cell.flavour,
    )
    own = {"flavour": cell.flavour, "repeat": 0, "config_sha256": cell.config_sha256}
    row = step.row(**own, **facts)
    events = [event.to_dict() for event in step.events]
    return RawResult(cell.id, row, _devices(cell, step), _steps(step), events)


def _devices(cell: SimulatedCell, step: Simulation) -> list[dict[str, Any]]:
    return [
        {
            "partition": use.device,
            "device": f"cuda:{use.device}",
            "layers": cell.balance[use.device],
            "peak_allocated_gib": use.peak_allocated_gib,
            "peak_reserved_gib": use.peak_reserved_gib,
            "compute_fraction": use.compute_fraction,
            "recompute_fraction": use.recompute_fraction,
            "copy_fraction": use.copy_fraction,
            "imbalance_fraction": use.imbalance_fraction,
            "bubble_fraction": use.bubble_fraction,
            "utilization_fraction": use.utilization_fraction,
        }
        for use in step.devices
    ]


def _steps(step: Simulation) -> list[dict[str, Any]]:
    if step.step_time_ms is None:
        return []
    values = {"step_time_ms": step.step_time_ms, "throughput_samples_per_s": step.throughput_samples_per_s}
    return [{"step": 0, **values}]
