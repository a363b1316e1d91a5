"""The cases by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.simulator.runs.events import Settings, run
from gpipe_bench.simulator.workloads.workload import Machine, Workload
from tests.simulator.digests.digest import INPUT, input_of, outcome_of

__all__ = ["Case", "Cases", "Line", "line_of"]

Line = dict[str, str]
"""A case with its digests: ``case``, ``input`` and the fields of an outcome."""


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
        try:
            outcome: object = run(self.workload, self.machine, self.settings)
        except OutOfMemory as error:
            outcome = error
        return line_of(self, outcome)


Cases = Callable[[], Iterator[Case]]
"""Makes the cases of a group, always the same in the same order."""


def line_of(case: Case, outcome: object) -> Line:
    """A case with the digests of what came of it."""
    asked = case.workload, case.machine, case.settings
    return {"case": case.name, INPUT: input_of(*asked), **outcome_of(outcome)}
