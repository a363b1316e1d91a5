"""Repeats of one cell, one after the other, each in a fresh process that does not have to load PyTorch again.

this process   loads PyTorch once and touches no device
a repeat       a fork of it, which measures and sends its result; where it dies, the row says so
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

from gpipe_bench.bench.running.failures import BAD_ARGUMENTS
from gpipe_bench.bench.running.run import Measure, failed_result, run_cell
from gpipe_bench.bench.spec.cells import MeasuredCell
from gpipe_bench.bench.storage.raw import RawResult
from gpipe_bench.util.processes import FORKS, begin_child, forking

_MEASURING: Final = "gpipe_bench.bench.running.measured"


def run_repeats(
    cell: MeasuredCell,
    repeats: int,
    report: Callable[[RawResult], None],
    measure: Measure | None = None,
) -> list[RawResult]:
    """Run ``cell`` so many times; each is a result, whatever happens to it.

    Args:
        cell: what to measure.
        repeats: how many times.
        report: takes each result as it comes.
        measure: what measures it; see :func:`gpipe_bench.bench.running.run.run_cell`.

    Raises:
        ConfigError, BalanceError: the arguments do not fit the model.
    """
    results = []
    for repeat in range(repeats):
        # Processes of a pipeline are new ones anyway.
        here = cell.unsupported() or cell.processes > 1
        result = run_cell(cell, repeat, measure) if here else _in_child(cell, repeat, measure)
        report(result)
        results.append(result)
    return results


def _in_child(cell: MeasuredCell, repeat: int, measure: Measure | None) -> RawResult:
    if FORKS and measure is None:
        importlib.import_module(_MEASURING)
    context = multiprocessing.get_context("fork") if FORKS else multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_measure, args=(theirs, os.getpid(), cell, repeat, measure), daemon=True)
    with forking():
        child.start()
    theirs.close()
    try:
        result: RawResult | None = ours.recv()
    except EOFError:
        child.join()
        return failed_result(cell, repeat, "error", _death(child.exitcode or 0))
    finally:
        child.kill()
        child.join()
        ours.close()
    # Arguments that are refused are refused again, with the error that says why.
    return run_cell(cell, repeat, measure) if result is None else result


def _measure(results: Connection, caller: int, cell: MeasuredCell, repeat: int, measure: Measure | None) -> None:
    begin_child(caller)
    try:
        found = run_cell(cell, repeat, measure)
    except BAD_ARGUMENTS:
        results.send(None)
    else:
        results.send(found)


def _death(status: int) -> str:
    if status >= 0:
        return f"process ended with status {status} before it had measured; its log says more"
    names = {number.value: number.name for number in signal.Signals}
    return f"process was killed by signal {-status} ({names.get(-status, 'unknown')}) before it had measured"
