"""The race: contenders take turns in rounds, in an order drawn anew for each round, one at a time.

Per case: every contender is opened and warmed up; then rounds; then, each in a fresh fork of its process, its gradients
in float64, where kernels that sum in another order do not show, and its peak of live bytes. One that fails is out for
this case and takes part in the next.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpipe_bench.bench.peers.cases import PeerCase
from gpipe_bench.bench.peers.client import Child, PeerError, children
from gpipe_bench.bench.peers.contenders import REFERENCE, Contender

if TYPE_CHECKING:
    from gpipe_bench.bench.peers.kept import KeptCases

_MOST_STEPS: Final = 50
_COUNTED_STEPS: Final = 2
Report = Callable[[str], None]
Watch = Callable[[int, int, str], None]
"""Takes the rounds done, all rounds, and a text about the next one; called between timed steps."""


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
class Outcome:
    """One contender on one case."""

    case: PeerCase
    contender: Contender
    version: str = ""
    status: str = "ok"
    reason: str = ""
    visits: list[Visit] = field(default_factory=list)
    gradient_difference: float | None = None
    forward_passes: float | None = None
    peak_bytes: int | None = None
    step_s: float = 0.0

    def fail(self, error: PeerError) -> None:
        """Out of this case."""
        self.status, self.reason = error.status, error.reason


@dataclass(slots=True)
class Raced:
    """A case with all its outcomes, and what the probe found: times of partitions and of transfers."""

    case: PeerCase
    outcomes: list[Outcome]
    alone: list[list[float]] | None = None
    one_way_s: list[float] | None = None


def run_race(
    cases: Sequence[PeerCase],
    contenders: Sequence[Contender],
    *,
    log: Path,
    timeout_s: float,
    probe_s: float,
    report: Report,
    kept: KeptCases,
    watch: Watch | None = None,
) -> tuple[dict[str, Any], list[Raced]]:
    """Run all ``cases``, one after the other.

    Args:
        cases: what is run; balances that are missing are found first.
        contenders: who runs it.
        log: takes what contenders print.
        timeout_s: what a contender may take for one answer.
        probe_s: seconds of each measurement beside the race.
        report: takes a line per case.
        kept: has the cases that an earlier run of this race has finished, and takes those of this one.
        watch: takes each step of the race as it begins.

    Returns:
        Facts of machine and software, and the cases with their outcomes.
    """
    names = ["probe", *(contender.name for contender in contenders)]
    with children(names, log, timeout_s) as made, tempfile.TemporaryDirectory(prefix="race-") as folder:
        probe = made.pop("probe")
        if not kept.facts:
            kept.begin(probe.ask("facts", case=cases[0], seconds=0)["facts"])
            probe.close()
        raced = []
        rounds = _Rounds(sum(case.rounds for case in cases if kept.get(case) is None), watch)
        for number, case in enumerate(cases, start=1):
            before = kept.get(case)
            if before is not None:
                raced.append(before)
                continue
            rounds.begin(f"case {number} of {len(cases)} ({case.id})")
            raced.append(_race(_balanced(case, contenders, probe, probe_s), contenders, made, Path(folder), rounds))
            _add_probes(raced[-1], probe, probe_s)
            kept.add(raced[-1])
            report(f"case {number} of {len(cases)}, {case.id}: {_words(raced[-1])}")
    return kept.facts, raced


def _balanced(case: PeerCase, contenders: Sequence[Contender], probe: Child, seconds: float) -> PeerCase:
    """``case`` with the balances that its contenders need; the probe finds those that are missing."""
    if case.balance:
        return case

    def found(n: int) -> tuple[int, ...]:
        return tuple(_probed(probe, "balance", replace(case, partitions=n), seconds)["balance"])

    fine = any(contender.two_per_device for contender in contenders)
    return replace(case, balance=found(case.partitions), fine_balance=found(2 * case.partitions) if fine else ())


def _own_case(case: PeerCase, contender: Contender) -> PeerCase:
    return replace(case, balance=case.fine_balance) if contender.two_per_device else case


def _probed(probe: Child, do: str, case: PeerCase, seconds: float) -> dict[str, Any]:
    answer = probe.ask(do, case=case, seconds=seconds)
    probe.close()
    return answer


@dataclass(slots=True)
class _Rounds:
    """How far the race is."""

    total: int
    watch: Watch | None
    done: int = 0
    case: str = ""

    def begin(self, case: str) -> None:
        self.case = case
        self.say("getting ready")

    def say(self, what: str) -> None:
        if self.watch:
            self.watch(self.done, self.total, f"{self.case}, {what}")


def _race(
    case: PeerCase,
    contenders: Sequence[Contender],
    made: dict[str, Child],
    folder: Path,
    rounds: _Rounds | None = None,
) -> Raced:
    rounds = rounds or _Rounds(case.rounds, None)
    own = [contender for contender in contenders if contender.runs(case.workload)]
    outcomes = {contender.name: Outcome(_own_case(case, contender), contender) for contender in own}
    going: dict[str, Child] = {}

    def attempt(name: str, work: Callable[[Child, Outcome], None]) -> None:
        """Let a contender do something; where it fails it is out."""
        try:
            work(made[name], outcomes[name])
            going[name] = made[name]
        except PeerError as error:
            outcomes[name].fail(error)
            going.pop(name, None)

    for name in outcomes:
        rounds.say(f"opening {name}")
        attempt(name, _open)
    order = random.Random(case.seed)  # noqa: S311 - an order, no secret
    for number in range(case.rounds):
        for position, name in enumerate(order.sample(sorted(going), len(going))):
            rounds.say(f"round {number + 1} of {case.rounds}, {name}")
            attempt(name, lambda child, outcome: _visit(child, outcome, number, position))  # noqa: B023 - called at once
        rounds.done += 1
    rounds.say("comparing gradients and counting memory")
    for child in going.values():
        child.close()
    for name in list(going):
        attempt(name, lambda child, outcome: _save_gradients(child, outcome, folder))
    _compare_gradients(outcomes, going, folder)
    if case.workload != "combinations":  # which need what all components on need
        for name, child in going.items():
            _count(child, outcomes[name])
    return Raced(case, list(outcomes.values()))


def _open(child: Child, outcome: Outcome) -> None:
    outcome.version = child.ready()["version"]
    child.ask("open", case=outcome.case, count=False)
    outcome.step_s = child.ask("run", warmup=1, steps=1)["wall_s"][0]


def _visit(child: Child, outcome: Outcome, number: int, position: int) -> None:
    steps = max(1, min(int(outcome.case.visit_s / outcome.step_s), _MOST_STEPS))
    # The first step of a visit finds sleeping threads, and caches that other contenders filled.
    answer = child.ask("run", warmup=1, steps=steps)
    outcome.visits.append(Visit(number, position, answer["wall_s"], answer["cpu_s"]))
    outcome.step_s = min(answer["wall_s"])


def _save_gradients(child: Child, outcome: Outcome, folder: Path) -> None:
    child.ask("open", case=replace(outcome.case, precision="float64"), count=False)
    answer = child.ask("gradients", path=str(folder / f"{child.name}.npz"))
    outcome.forward_passes = answer["forward_passes"]
    child.close()


def _compare_gradients(outcomes: dict[str, Outcome], going: dict[str, Child], folder: Path) -> None:
    if REFERENCE not in going:
        return
    wanted = _gradients(folder / f"{REFERENCE}.npz")
    for name in going:
        outcomes[name].gradient_difference = _difference(_gradients(folder / f"{name}.npz"), wanted)


def _gradients(path: Path) -> list[Any]:
    with np.load(path) as file:
        return [file[name] for name in file.files]


def _difference(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """Largest absolute difference over the largest absolute value wanted; infinite for other shapes or NaN."""
    if [a.shape for a in found] != [b.shape for b in wanted]:
        return math.inf
    scale = max(float(np.abs(b).max()) for b in wanted)
    largest = max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
    if largest == 0:
        return 0.0
    return largest / scale if np.isfinite(largest) and scale > 0 else math.inf


def _count(child: Child, outcome: Outcome) -> None:
    try:
        child.ask("open", case=outcome.case, count=True)
        child.ask("run", warmup=_COUNTED_STEPS, steps=0)
        outcome.peak_bytes = child.ask("peak")["bytes"]
    except PeerError as error:
        outcome.reason = f"live bytes could not be counted: {error.reason}"
    finally:
        child.close()


def _add_probes(raced: Raced, probe: Child, seconds: float) -> None:
    """Times of partitions and of transfers, for the split of the gap."""
    if raced.case.tiny or raced.case.partitions == 1:
        return
    raced.alone = _probed(probe, "partitions", raced.case, seconds)["alone"]
    if any(outcome.contender.process_per_device and outcome.status == "ok" for outcome in raced.outcomes):
        raced.one_way_s = _probed(probe, "transfers", raced.case, seconds)["one_way_s"]


def _words(raced: Raced) -> str:
    good = sum(outcome.status == "ok" for outcome in raced.outcomes)
    others = [f"{o.contender.name} {o.status}" for o in raced.outcomes if o.status != "ok"]
    return f"{good} contenders{''.join(f', {words}' for words in others)}"
