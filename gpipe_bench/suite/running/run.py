"""One run of one cell, in the process that calls it: a row comes back whatever happens.

    unsupported on the device   a row that says so, before PyTorch is loaded
    out of memory               a row with status oom
    fewer devices than it needs a row with status skipped: nothing ran, since the number would be another cell's
    any other failure           a row with status error; it names the line of a user's model that failed, and for
                                other code the traceback goes to stderr
    wrong arguments             an exception: there is nothing to measure and no row

A failed cell must not end the experiment that it belongs to, so all but the last count as done; tables show them.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

from gpipe_bench.errors import DeviceCountError
from gpipe_bench.measure.host import cpu_count, cpu_name, host_facts, machine_slug
from gpipe_bench.models.own import own_line
from gpipe_bench.suite.cells import MeasuredCell
from gpipe_bench.suite.running.failures import BAD_ARGUMENTS, status_of
from gpipe_bench.suite.storage.raw import RawResult, cell_row

Pieces = Generator[None, None, RawResult]
"""A measurement that stops before each timed step, so that others can have their turn; the result is its value."""

Measure = Callable[[MeasuredCell, int], Pieces]


def run_cell(cell: MeasuredCell, repeat: int, measure: Measure | None = None) -> RawResult:
    """Run ``cell`` once.

    Args:
        cell: what to measure.
        repeat: 0-based number of the repeat.
        measure: what measures it; by default :func:`gpipe_bench.suite.running.measured.measure_cell`, on real devices.

    Raises:
        ConfigError, BalanceError: the arguments do not fit the model.
    """
    return finished(cell_pieces(cell, repeat, measure))


def finished(pieces: Pieces) -> RawResult:
    """The result of a measurement, all pieces of which are done at once."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: RawResult = end.value
            return result


def cell_pieces(cell: MeasuredCell, repeat: int, measure: Measure | None = None) -> Pieces:
    """The same as :func:`run_cell` in pieces."""
    reason = cell.unsupported()
    if reason:
        return failed_result(cell, repeat, "unsupported", reason)
    try:
        return (yield from (measure or _measure)(cell, repeat))
    except DeviceCountError as error:
        return failed_result(cell, repeat, "skipped", status_of(error)[1])
    except BAD_ARGUMENTS:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model, PyTorch or a driver raises becomes a row
        status, reason = status_of(error)
        line = own_line(cell.model, error) if status == "error" else ""
        if status == "error" and not line:
            traceback.print_exc()
        return failed_result(cell, repeat, status, f"{reason} ({line})" if line else reason)


def failed_result(cell: MeasuredCell, repeat: int, status: str, reason: str) -> RawResult:
    """The result of a run without values: its row says why, and what would have run it where."""
    row = cell_row(cell, repeat, status=status, reason=reason, **_facts(cell))
    return RawResult(cell.id, row, configuration=cell.configuration)


def _facts(cell: MeasuredCell) -> dict[str, Any]:
    """All about devices and software that can be said without loading PyTorch for it."""
    if sys.modules.get("torch") is not None:
        from gpipe_bench.measure.environment import environment_facts

        # After a failure of the device the driver may refuse to say more; the row must come about all the same.
        with suppress(RuntimeError, AssertionError):
            return environment_facts(cell.partition_devices(), cell.hosts)
    name = cpu_name() if cell.device == "cpu" else ""
    profile = {"profile": machine_slug(name, cpu_count())} if name else {}
    return {"device": f"{cell.device} {name}".strip(), "device_count": cell.devices, **profile, **host_facts()}


def _measure(cell: MeasuredCell, repeat: int) -> Pieces:
    from gpipe_bench.suite.running.ranks import rank_here, run_in_ranks

    if cell.processes > 1 and rank_here(cell) is None:
        return run_in_ranks(cell, repeat)
    from gpipe_bench.suite.running.measured import measure_cell

    return (yield from measure_cell(cell, repeat))
