"""Emulated cells: the engine on virtual devices, whose kernels take the time of a profile. Imports no PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gpipe_bench.step.request import MOST_EMULATED_DEVICES, EmulatedSteps, HostTime
from gpipe_bench.suite.settings import Problem
from gpipe_bench.suite.simulated_cells import SimulatedCell, VirtualCell


class EmulatedCell(VirtualCell):
    """One emulation; its timed steps are rows, a repeat each."""

    evidence: Literal["emulated"] = "emulated"
    host_time: HostTime = True
    steps: EmulatedSteps = 2

    def problems(self) -> Iterator[Problem]:
        """Rules of every pipeline, and no more devices than a process has."""
        yield from super().problems()
        if self.schedule_devices > MOST_EMULATED_DEVICES:
            text = (
                f"must be at most {MOST_EMULATED_DEVICES} where they are emulated, got {self.schedule_devices} devices"
            )
            yield Problem(("partitions", "schedule"), f"{text}; lower it")

    @property
    def twin(self) -> SimulatedCell:
        """The same pipeline on the simulator, with the autograd engine of today."""
        return SimulatedCell(**{**self.shared(SimulatedCell), "evidence": "simulated", "flavour": "current"})
