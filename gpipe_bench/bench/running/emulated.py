"""Emulated cells, one after the other in one process, which has virtual devices from then on.

Each timed step is a row, as a repeat is.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gpipe_bench.bench.running.simulated import device_records, simulation_facts
from gpipe_bench.bench.spec.emulated_cells import EmulatedCell
from gpipe_bench.bench.storage.raw import RawResult
from gpipe_bench.models.table import parse_arguments
from gpipe_bench.rows import Row

if TYPE_CHECKING:
    from gpipe_bench.emulator.emulate import Emulation


def emulate_cells(
    cells: Iterable[EmulatedCell],
    report: Callable[[Row], None] | None = None,
    timelines: Container[str] | None = None,
) -> list[RawResult]:
    """Emulate cells: a result for each timed step of each cell, in the order of the cells.

    Where there are no virtual devices, as without a C++ compiler, a cell is a row with status ``skipped`` that says
    why; one that does not fit the memory of a device says how much it needs.

    Args:
        cells: what to emulate, all on one profile.
        report: takes each row as it is made.
        timelines: ids of the cells whose timelines are kept; by default of all.

    Raises:
        BalanceError: a balance does not fit its model.
    """
    from gpipe_bench.emulator.build import obstacle

    facts = simulation_facts()
    reason = obstacle()
    results: list[RawResult] = []
    for cell in cells:
        kept = timelines is None or cell.id in timelines
        found = [_skipped(cell, reason, facts)] if reason else _emulated(cell, facts, timeline=kept)
        results += found
        if report:
            for result in found:
                report(result.row)
    return results


def _skipped(cell: EmulatedCell, reason: str, facts: Mapping[str, Any]) -> RawResult:
    """The row of a cell that cannot be emulated here."""
    components, balance = cell.components, "-".join(map(str, cell.balance))
    names = ("model", "variant", "backward", "schedule", "transfer", "partitions", "chunks", "microbatches",
             "checkpoint", "batch_size", "config_sha256")  # fmt: skip
    row = Row(
        evidence="emulated",
        status="skipped",
        reason=reason,
        **{name: getattr(cell, name) for name in names},
        **{name: getattr(components, name) for name in components.__slots__},
        model_args=str(cell.settings()["model_args"]),
        balance=balance,
        repeat=0,
        device=f"cuda {cell.hardware_device}",
        device_count=cell.schedule_devices,
        profile=cell.hardware,
        cell=cell.id,
        **facts,
    )
    return RawResult(cell.id, row, configuration=cell.configuration)


def _emulated(cell: EmulatedCell, facts: Mapping[str, Any], *, timeline: bool) -> list[RawResult]:
    # Here and not above: these load PyTorch.
    from gpipe_bench.bench.running.layer_costs import simulated_balance
    from gpipe_bench.emulator.emulate import emulate, prepare
    from gpipe_bench.simulator import Model

    # The balance comes from traces, which are backward passes: virtual devices must be there before.
    prepare(cell.profile)
    balance = cell.balance or simulated_balance(cell.twin)
    run = emulate(
        Model(cell.model, parse_arguments(cell.model, cell.model_args)),
        balance=balance,
        batch_size=cell.batch_size,
        chunks=cell.chunks,
        checkpoint=cell.checkpoint,
        components=cell.components,
        schedule=cell.schedule if cell.backward == "scheduled" else None,
        transfer=cell.transfer,
        optimizer=cell.optimizer,
        profile=cell.profile,
        steps=cell.steps,
        host_time=cell.host_time,
    )
    layers = [0] * cell.schedule_devices
    for device, count in zip(cell.homes(), balance, strict=True):
        layers[device] += count
    return [_result(cell, step, (repeat, layers), facts, timeline=timeline) for repeat, step in enumerate(run.each)]


def _result(
    cell: EmulatedCell, step: Emulation, place: tuple[int, list[int]], facts: Mapping[str, Any], *, timeline: bool
) -> RawResult:
    repeat, layers = place
    row = step.row(repeat=repeat, config_sha256=cell.config_sha256, cell=cell.id, **facts)
    times = {"step_time_ms": step.step_time_ms, "throughput_samples_per_s": step.throughput_samples_per_s}
    steps = [{"step": 0, **times}] if step.status == "ok" else []
    events = [event.to_dict() for event in step.events] if timeline else []
    return RawResult(cell.id, row, device_records(step.devices, layers), steps, events, cell.configuration)
