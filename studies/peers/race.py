"""The race: contenders take turns in rounds, in an order drawn anew for each round, one at a time.

Per case: every contender is opened in fresh processes and warmed up; then rounds; then, in fresh processes again, its
gradients in float64, where kernels that sum in another order do not show. One that fails is out for this case and takes
part in the next.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.suite.running.turns import take_turns
from studies.peers import child
from studies.peers.cases import PeerCase
from studies.peers.contenders import REFERENCE, Contender
from studies.peers.seat import Seat

Array = NDArray[np.floating]
_MOST_STEPS: Final = 50
ENVIRONMENT: Final = {
    # GPUs counted by NVML leave CUDA to forks.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # A fork has only the threads that it starts itself: NumPy's would be lost.
    "OPENBLAS_NUM_THREADS": "1",
    # glibc gives freed memory back to the kernel or not as it has learned from what came before, and a step that gets
    # it anew, page by page, takes up to a quarter longer. Everybody keeps it.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(2**27),
}
"""What contenders find in their environment beside the caller's."""


class PeerError(Exception):
    """A contender cannot go on.

    Attributes:
        status: of its row.
        reason: likewise.
    """

    def __init__(self, status: str, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Visit:
    """What a contender did in one round.

    Attributes:
        round: 0-based.
        position: its place in the order of that round, 0-based.
        wall_s: seconds of each step.
        cpu_s: CPU seconds of each step, all threads and processes.
    """

    round: int
    position: int
    wall_s: list[float]
    cpu_s: list[float]


@dataclass(slots=True)
class ContenderTimes:
    """One contender on one case."""

    case: PeerCase
    contender: Contender
    version: str = ""
    status: str = "ok"
    reason: str = ""
    visits: list[Visit] = field(default_factory=list)
    gradient_difference: float | None = None
    forward_passes: float | None = None


Raced = Sequence[ContenderTimes]
"""A case with all its contenders."""


class Entrant:
    """The processes of one contender on one case, open and warm: one, or one for each of its ranks.

    Attributes:
        version: of its package.
        step_s: seconds of its quickest step in the last visit.

    Raises:
        PeerError: it cannot take part.
    """

    def __init__(self, contender: Contender, case: PeerCase, timeout_s: float) -> None:
        if importlib.util.find_spec(contender.package) is None:
            install = f"make peers, or pip install --no-deps {contender.package}=={contender.version}"
            raise PeerError("skipped", f"{contender.package} is not installed; {install}")
        ranks = case.processes(contender)
        if case.device != "cpu" and case.devices < ranks:
            rule = f"{contender.name} must have a GPU for each of {ranks} ranks, got {case.devices}"
            raise PeerError("unsupported", f"{rule}: NCCL refuses two ranks on one GPU; use fewer partitions")
        self._timeout_s, self._pids = timeout_s, list[int]()
        self._folder = tempfile.TemporaryDirectory(prefix="race-")
        self._pools = [ProcessPoolExecutor(1, mp_context=_context()) for _ in range(ranks)]
        seats = [Seat(contender, case, rank, ranks) for rank in range(ranks)]
        try:
            self._pids = self.ask(child.start)
            self.version = str(self.ask(child.open_case, str(Path(self._folder.name) / "store"), each=seats)[0])
            self.step_s = self.visit(0, 1)[0][0]
        except PeerError:
            self.close()
            raise

    def ask(self, function: Callable[..., Any], *arguments: Any, each: Sequence[Any] = ()) -> list[Any]:
        """The answer of every process.

        Args:
            function: of the module :mod:`studies.peers.child`.
            arguments: for all processes.
            each: a first argument for each process.

        Raises:
            PeerError: one of them failed, ended or took too long.
        """
        given = [(one, *arguments) for one in each] or [arguments] * len(self._pools)
        try:
            asked = [pool.submit(child.answer, function, *own) for pool, own in zip(self._pools, given, strict=True)]
            done, waiting = wait(asked, self._timeout_s, FIRST_EXCEPTION)
            answers = [future.result() for future in asked if future in done]
        except BrokenProcessPool as error:
            raise PeerError("error", "its process ended without an answer") from error
        for status, reason, _ in answers:
            if status != "ok":
                raise PeerError(status, reason)
        if waiting:
            raise PeerError("error", f"no answer within {self._timeout_s:g} s")
        return [value for _, _, value in answers]

    def visit(self, warmup: int, steps: int) -> tuple[list[float], list[float]]:
        """Seconds and CPU seconds of each step: of several ranks from the first start to the last end."""
        wall, cpu = [], []
        for ranks in zip(*self.ask(child.visit, warmup, steps), strict=True):
            starts, ends, used = zip(*ranks, strict=True)
            wall.append(max(ends) - min(starts))
            cpu.append(sum(used))
        self.step_s = min(wall)
        return wall, cpu

    def gradients(self) -> tuple[list[Array], float]:
        """The gradients that a step leaves, in the order of the model's parameters, and its forward passes."""
        parts = self.ask(child.gradients)
        shares = zip(*(own for own, _ in parts), strict=True)
        return [sum(own) for own in shares], sum(passes for _, passes in parts)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pool in self._pools:
            pool.shutdown()
        self._folder.cleanup()


Enter = Callable[[Contender, PeerCase], Entrant]
"""Opens a contender."""


def run_race(
    cases: Sequence[PeerCase],
    contenders: Sequence[Contender],
    *,
    timeout_s: float,
    balance_s: float,
    report: Callable[[str], None],
) -> tuple[dict[str, Any], list[Raced]]:
    """Run all ``cases``, one after the other.

    Args:
        cases: what is run; balances that are missing are found first.
        contenders: who runs it.
        timeout_s: what a contender may take for one answer.
        balance_s: seconds in which layers are timed.
        report: takes a line per case.

    Returns:
        Facts of machine and software, and the cases with their outcomes.
    """
    with ProcessPoolExecutor(1, mp_context=_context()) as pool:
        facts = pool.submit(child.facts, cases[0]).result()
    fine = any(contender.two_per_device for contender in contenders)
    raced = []
    for number, case in enumerate(cases, start=1):
        own = case if case.balance else _balanced(case, balance_s, fine=fine)
        raced.append(race_case(own, contenders, lambda who, what: Entrant(who, what, timeout_s)))
        bad = [f", {one.contender.name} {one.status}" for one in raced[-1] if one.status != "ok"]
        report(f"case {number} of {len(cases)}, {case.id}: {len(raced[-1])} contenders{''.join(bad)}")
    return facts, raced


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["studies.peers.child"])
    return context


def _balanced(case: PeerCase, seconds: float, *, fine: bool) -> PeerCase:
    """``case`` with a balance, and where some contenders have two partitions per device with one for them."""
    with ProcessPoolExecutor(1, mp_context=_context()) as pool:
        counts = [case.partitions, *([2 * case.partitions] if fine else [])]
        found = [tuple(pool.submit(child.find_balance, case, count, seconds).result()) for count in counts]
    return replace(case, balance=found[0], fine_balance=found[-1] if fine else ())


def race_case(case: PeerCase, contenders: Sequence[Contender], enter: Enter) -> Raced:
    """Race the contenders that run the workload of a case, whose balances are known."""
    outcomes = [
        ContenderTimes(replace(case, balance=case.fine_balance) if contender.two_per_device else case, contender)
        for contender in contenders
        if contender.runs(case.workload)
    ]
    going: dict[str, Entrant] = {}
    try:
        for outcome in outcomes:
            with _out_if_it_fails(outcome):
                entrant = going[outcome.contender.name] = enter(outcome.contender, outcome.case)
                outcome.version = entrant.version
        for number, position, outcome in take_turns(partial(_going, outcomes), case.seed, case.rounds):
            with _out_if_it_fails(outcome):
                outcome.visits.append(_visit(going[outcome.contender.name], case, number, position))
    finally:
        for entrant in going.values():
            entrant.close()
    _compare_gradients([outcome for outcome in outcomes if outcome.status == "ok"], enter)
    return outcomes


def _going(outcomes: Sequence[ContenderTimes]) -> list[ContenderTimes]:
    """Who takes part in the next round, in an order that does not depend on the question."""
    return sorted((one for one in outcomes if one.status == "ok"), key=lambda one: one.contender.name)


@contextmanager
def _out_if_it_fails(outcome: ContenderTimes) -> Iterator[None]:
    try:
        yield
    except PeerError as error:
        outcome.status, outcome.reason = error.status, error.reason


def _visit(entrant: Entrant, case: PeerCase, number: int, position: int) -> Visit:
    steps = max(1, min(int(case.visit_s / entrant.step_s), _MOST_STEPS))
    # The first step of a visit finds sleeping threads, and caches that other contenders filled.
    return Visit(number, position, *entrant.visit(1, steps))


def _compare_gradients(outcomes: Sequence[ContenderTimes], enter: Enter) -> None:
    """Each contender in fresh processes in float64, one at a time, against the reference."""
    found: dict[str, list[Array]] = {}
    for outcome in outcomes:
        with _out_if_it_fails(outcome):
            entrant = enter(outcome.contender, replace(outcome.case, precision="float64"))
            try:
                found[outcome.contender.name], outcome.forward_passes = entrant.gradients()
            finally:
                entrant.close()
    for outcome in outcomes:
        if REFERENCE in found and outcome.contender.name in found:
            outcome.gradient_difference = difference(found[outcome.contender.name], found[REFERENCE])


def difference(found: Sequence[Array], wanted: Sequence[Array]) -> float:
    """Largest absolute difference over the largest absolute value wanted; infinite for other shapes or NaN."""
    if [a.shape for a in found] != [b.shape for b in wanted]:
        return math.inf
    scale = max(float(np.abs(b).max()) for b in wanted)
    largest = max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
    if largest == 0:
        return 0.0
    return largest / scale if np.isfinite(largest) and scale > 0 else math.inf
