"""The cases by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.simulator.clock.run import Run, Settings, run
from gpipe_bench.simulator.workloads.workload import Machine, Workload
from tests.simulator.digests.digest import INPUT, input_of, outcome_of, short

__all__ = ["Case", "CaseSettings", "Cases", "Line", "line_of"]

Line = dict[str, str]
"""A case with its digests: ``case``, ``input`` and the fields of an outcome."""


@dataclass(frozen=True, slots=True)
class CaseSettings(Settings):
    """Settings of a case.

    Attributes:
        tally: whether its digests were stored when runs could count the bytes of tensors alone, without an allocator: a
            run on devices without limit has to give the same bytes at the same times.
    """

    tally: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A run.

    Attributes:
        name: unique in its group.
        workload: what is run.
        machine: on what.
        settings: how.
    """

    name: str
    workload: Workload
    machine: Machine
    settings: Settings

    def line(self) -> Line:
        """Run it."""
        tallies = getattr(self.settings, "tally", False)
        machine = replace(self.machine, capacity_bytes=0) if tallies else self.machine
        try:
            outcome: object = run(self.workload, machine, self.settings)
        except OutOfMemory as error:
            outcome = error
        line = line_of(self, outcome)
        if tallies and isinstance(outcome, Run):
            line |= dict.fromkeys(("allocated", "reserved"), short([0] * len(outcome.memory)))
        return line


Cases = Callable[[], Iterator[Case]]
"""Makes the cases of a group, always the same in the same order."""


def line_of(case: Case, outcome: object) -> Line:
    """A case with the digests of what came of it."""
    asked = case.workload, case.machine, case.settings
    return {"case": case.name, INPUT: input_of(*asked), **outcome_of(outcome)}
