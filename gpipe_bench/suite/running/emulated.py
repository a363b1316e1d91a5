"""Emulated cells, one after the other in one process, which has virtual devices from then on.

Each timed step is a row, as a repeat is.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gpipe_bench.models.table import parse_arguments
from gpipe_bench.suite.emulated_cells import EmulatedCell
from gpipe_bench.suite.running.simulated import simulated_balance, simulation_facts, step_result
from gpipe_bench.suite.storage.raw import RawResult, cell_row

if TYPE_CHECKING:
    from gpipe_bench.results.rows import Row
    from gpipe_bench.step.result import Step


def emulate_cells(
    cells: Iterable[EmulatedCell],
    report: Callable[[Row], None] | None = None,
    timelines: Container[str] | None = None,
    *,
    steps: list[Step] | None = None,
) -> list[RawResult]:
    """Emulate cells: a result for each timed step of each cell, in the order of the cells.

    Where there are no virtual devices, as without a C++ compiler, a cell is a row with status ``skipped`` that says
    why; one that does not fit the memory of a device says how much it needs.

    Args:
        cells: what to emulate, all on one profile.
        report: takes each row as it is made.
        timelines: ids of the cells whose timelines are kept; by default of all.
        steps: takes the step of median length of each cell, too, with its trace.

    Raises:
        BalanceError: a balance does not fit its model.
    """
    from gpipe_bench.emulator.build import obstacle

    facts = simulation_facts()
    reason = obstacle()
    results: list[RawResult] = []
    for cell in cells:
        kept = timelines is None or cell.id in timelines
        found = [_skipped(cell, reason, facts)] if reason else _emulated(cell, facts, timeline=kept, steps=steps)
        results += found
        if report:
            for result in found:
                report(result.row)
    return results


def _skipped(cell: EmulatedCell, reason: str, facts: Mapping[str, Any]) -> RawResult:
    known = {"device": f"cuda {cell.hardware_device}", "device_count": len({*cell.device_numbers})}
    known |= {"profile": cell.hardware, "status": "skipped", "reason": reason}
    known |= {"balance": "-".join(map(str, cell.balance))}
    row = cell_row(cell, 0, **known, **facts)
    return RawResult(cell.id, row, configuration=cell.configuration)


def _emulated(
    cell: EmulatedCell, facts: Mapping[str, Any], *, timeline: bool, steps: list[Step] | None
) -> list[RawResult]:
    # Here and not above: these load PyTorch.
    from gpipe_bench.emulator import emulate, prepare
    from gpipe_bench.simulator import Model

    # The balance comes from traces, which are backward passes: virtual devices must be there before.
    prepare(cell.profile)
    balance = cell.balance or simulated_balance(cell.twin)
    run = emulate(
        Model(cell.model, parse_arguments(cell.model, cell.model_args)),
        **cell.arguments(),
        balance=balance,
        devices=cell.device_numbers,
        keep_trace=steps is not None,
    )
    if steps is not None:
        steps.append(run)
    return [
        step_result(cell, step, balance, {"repeat": repeat, **facts}, timeline=timeline)
        for repeat, step in enumerate(run.each)
    ]
