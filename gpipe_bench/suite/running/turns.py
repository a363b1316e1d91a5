"""Cells of one job in turns: every repeat of every cell in a fresh process, one step of one process at a time.

Whatever else the machine does then meets all cells alike, and a ratio compares values of the same seconds.

    round 0         B  A  C    build and warm up
    rounds 1 to k   A  C  B    one timed step each, while the other processes sleep
    last round      C  A  B    timeline and memory; the result

A process is a fork of this one, which has loaded PyTorch and touches no device. If it dies, the row says so, and the
other cells go on.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from time import monotonic
from typing import Final, TypeVar

from gpipe_bench.suite.cells import MeasuredCell
from gpipe_bench.suite.running.failures import BAD_ARGUMENTS
from gpipe_bench.suite.running.run import Measure, cell_pieces, failed_result, run_cell
from gpipe_bench.suite.storage.raw import RawResult
from gpipe_bench.util.processes import FORKS, begin_child, forking

T = TypeVar("T")
_MEASURING: Final = "gpipe_bench.suite.running.measured"
_MARGIN: Final = 1.15
"""By how much a run may take longer than the longest one before."""
_OVER: Final = "the budget of time did not suffice for this run"


def take_turns(waiting: Callable[[], Sequence[T]], seed: int, most: int | None = None) -> Iterator[tuple[int, int, T]]:
    """Rounds in which each one has one turn, in an order that is drawn anew for each round.

    Args:
        waiting: who takes part in the next round; nobody: the end.
        seed: of the orders.
        most: rounds, if there is a limit.

    Yields:
        Round and place in its order, both 0-based, and whose turn it is.
    """
    order = random.Random(seed)  # noqa: S311 - an order, no secret
    for number in count() if most is None else range(most):
        turns = waiting()
        if not turns:
            return
        for place, one in enumerate(order.sample(turns, len(turns))):
            yield number, place, one


def run_repeats(
    groups: Sequence[Sequence[MeasuredCell]],
    repeats: int,
    report: Callable[[RawResult | None], None],
    measure: Measure | None = None,
    budget_s: float | None = None,
) -> list[RawResult]:
    """Run each cell so many times, round by round; each run is a result, whatever happens to it.

    A cell that is unsupported is one result. A cell of several processes is measured in one turn.

    Args:
        groups: what to measure, one group after the other; the cells of a group take turns.
        repeats: how many times.
        report: takes what each turn gave: a result, or None where the run goes on.
        measure: what measures a cell; see :func:`gpipe_bench.suite.running.run.run_cell`.
        budget_s: seconds for all runs. One that is under way then is ended; it, and those for which the time of the
            longest one is not left, are results with status ``skipped``.

    Returns:
        All results of the first cell, then those of the next.

    Raises:
        ConfigError, BalanceError: the arguments do not fit the model.
    """
    found: dict[str, list[RawResult]] = {cell.id: [] for cells in groups for cell in cells}
    deadline, longest_s = None if budget_s is None else monotonic() + budget_s, 0.0
    for repeat in range(repeats):
        for cells in groups:
            begin = monotonic()
            late = deadline is not None and deadline - begin <= longest_s * _MARGIN
            limit = begin if late else deadline
            runs = [_Run(cell, repeat, measure, limit) for cell in cells if not (repeat and cell.unsupported())]
            try:
                for _, _, run in take_turns(partial(_unfinished, runs), seed=repeat):
                    run.go_on()
                    if run.result is not None:
                        found[run.cell.id].append(run.result)
                    report(run.result)
            finally:
                for run in runs:
                    run.close()
            longest_s = max(longest_s, monotonic() - begin)
    return [result for results in found.values() for result in results]


class _Run:
    """One repeat of a cell, which goes on when it is its turn.

    Attributes:
        result: None until it has ended.
    """

    def __init__(self, cell: MeasuredCell, repeat: int, measure: Measure | None, deadline: float | None = None) -> None:
        self.cell = cell
        self._deadline = deadline
        self.result: RawResult | None = None
        self._asked = cell, repeat, measure
        self._process: multiprocessing.process.BaseProcess | None = None

    def go_on(self) -> None:
        """Let its process do the next piece, and wait for that.

        Raises:
            ConfigError, BalanceError: the arguments do not fit the model.
        """
        left = None if self._deadline is None else max(self._deadline - monotonic(), 0.0)
        if left == 0 and not self.cell.unsupported():
            self.result = failed_result(*self._asked[:2], "skipped", _OVER)
            return
        if self.cell.unsupported() or self.cell.processes > 1:  # processes of a pipeline are new ones anyway
            self.result = run_cell(*self._asked)
            return
        if self._process is None:
            self._process, self._pipe = _started(self._asked)
        try:
            self._pipe.send(None)
            if not self._pipe.poll(left):
                self.result = failed_result(*self._asked[:2], "skipped", _OVER)
                return
            ended, self.result = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            self.result = failed_result(*self._asked[:2], "error", _death(self._process.exitcode or 0))
            return
        if ended and self.result is None:
            # Arguments that are refused are refused again, with the error that says why.
            self.result = run_cell(*self._asked)

    def close(self) -> None:
        """End its process, whatever that is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()


def _unfinished(runs: Sequence[_Run]) -> list[_Run]:
    return [run for run in runs if run.result is None]


_Asked = tuple[MeasuredCell, int, Measure | None]


def _started(asked: _Asked) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    if FORKS and asked[2] is None:
        importlib.import_module(_MEASURING)
    context = multiprocessing.get_context("fork") if FORKS else multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(theirs, os.getpid(), asked), daemon=True)
    with forking():
        process.start()
    theirs.close()
    return process, ours


def _measure(turns: Connection, caller: int, asked: _Asked) -> None:
    """In the process: a piece for each message; answers whether that was the last one, and then with the result."""
    begin_child(caller)
    pieces = cell_pieces(*asked)
    while True:
        turns.recv()
        try:
            next(pieces)
        except StopIteration as end:
            turns.send((True, end.value))
        except BAD_ARGUMENTS:
            turns.send((True, None))
        else:
            turns.send((False, None))


def _death(status: int) -> str:
    if status >= 0:
        return f"process ended with status {status} before it had measured; its log says more"
    names = {number.value: number.name for number in signal.Signals}
    return f"process was killed by signal {-status} ({names.get(-status, 'unknown')}) before it had measured"
