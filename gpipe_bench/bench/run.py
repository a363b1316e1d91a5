"""One run of one cell, in the process that calls it: a row comes back whatever happens.

    unsupported on the device   a row that says so, before PyTorch is loaded
    out of memory               a row with status oom
    any other failure           a row with status error; the traceback goes to stderr
    wrong arguments             an exception: there is nothing to measure and no row

A failed cell must not end the experiment that it belongs to, so the first three all count as done; tables show them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from platform import python_version
from typing import Any

from gpipe_bench.bench.cells import Cell
from gpipe_bench.bench.failures import BAD_ARGUMENTS, status_of
from gpipe_bench.bench.raw import RawResult, cell_row

__all__ = ["failed_result", "run_cell"]

Measure = Callable[[Cell, int], RawResult]


def run_cell(cell: Cell, repeat: int, measure: Measure | None = None) -> RawResult:
    """Run ``cell`` once.

    Args:
        cell: what to measure.
        repeat: 0-based number of the repeat.
        measure: what measures it; by default :func:`gpipe_bench.bench.measured.measure_cell`, on real devices.

    Raises:
        ConfigError, BalanceError, DeviceCountError: the arguments do not fit the model or this machine.
    """
    reason = cell.unsupported()
    if reason:
        return failed_result(cell, repeat, "unsupported", reason)
    started = _now()
    try:
        return (measure or _measure)(cell, repeat)
    except BAD_ARGUMENTS:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model, PyTorch or a driver raises becomes a row
        status, reason = status_of(error)
        if status == "error":
            traceback.print_exc()
        return failed_result(cell, repeat, status, reason, started_utc=started)


def failed_result(cell: Cell, repeat: int, status: str, reason: str, **values: Any) -> RawResult:
    """The result of a run without values: its row says why, and what software would have run it."""
    facts = {
        "device": cell.device,
        "device_count": cell.devices,
        "python": python_version(),
        "torch": metadata.version("torch"),
        "started_utc": _now(),
    }
    return RawResult(cell.id, cell_row(cell, repeat, status=status, reason=reason, **{**facts, **values}))


def _measure(cell: Cell, repeat: int) -> RawResult:
    from gpipe_bench.bench.measured import measure_cell

    return measure_cell(cell, repeat)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
