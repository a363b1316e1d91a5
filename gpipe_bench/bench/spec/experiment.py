"""What an experiment is: the runs, simulations and emulations that a section of the configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gpipe_bench.bench.spec.cells import CellRun
from gpipe_bench.bench.spec.emulated_cells import EmulatedCell
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.bench.spec.settings import Section
from gpipe_bench.bench.spec.simulated_cells import SimulatedCell


class Experiment(Section):
    """A section of the configuration that asks for runs."""

    timelines: ClassVar[bool] = False
    """Whether the timelines of its simulations and emulations are kept."""
    verified: ClassVar[bool] = True
    """Whether ``verify`` runs it, to hold its rows to the reference."""

    def runs(self, machine: Machine) -> list[CellRun]:  # noqa: ARG002 - those that measure look at it
        """The runs on ``machine``; what it cannot run is among them, as rows that say so. None by default."""
        return []

    def simulations(self) -> list[SimulatedCell]:
        """What is simulated, whatever this machine has; nothing by default."""
        return []

    def emulations(self) -> list[EmulatedCell]:
        """What is emulated, wherever there is a C++ compiler; nothing by default."""
        return []

    def tables(self) -> Sequence[str]:
        """Published tables that are simulated as they were run; none by default."""
        return ()
