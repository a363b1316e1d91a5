"""What the Snakefile asks the package: which runs there are, with which options. Imports no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_bench.bench.cells import CellRun, experiment_cells
from gpipe_bench.bench.config import SuiteConfig, load_config, parse_config
from gpipe_bench.bench.simulated_cells import SIMULATED_PATTERN, SimulatedWorkload
from gpipe_bench.components import PUBLISHED

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """All runs of the suite on this machine.

    Attributes:
        runs: the measured runs of each experiment.
        simulated: what each experiment simulates, if it does.
    """

    runs: dict[str, list[CellRun]]
    simulated: dict[str, SimulatedWorkload]

    @property
    def arguments(self) -> dict[str, list[str]]:
        """For each cell, whatever experiment asks for it, the options of ``python -m gpipe_bench run``."""
        return {run.cell.id: run.cell.arguments() for runs in self.runs.values() for run in runs}

    @property
    def simulations(self) -> dict[str, list[str]]:
        """For each experiment that simulates, the options of ``python -m gpipe_bench simulate-variants``."""
        return {experiment: workload.arguments() for experiment, workload in self.simulated.items()}

    @property
    def profiles(self) -> dict[str, str]:
        """For each experiment that simulates, the file of its hardware profile."""
        return {experiment: workload.profile_path for experiment, workload in self.simulated.items()}

    @property
    def raw(self) -> dict[str, list[str]]:
        """For each experiment the raw results that it is made from."""
        return {
            experiment: [
                *([SIMULATED_PATTERN.format(experiment=experiment)] if experiment in self.simulated else []),
                *(str(run.path) for run in runs),
            ]
            for experiment, runs in self.runs.items()
        }

    def published(self, experiment: str, evidence: str = "measured") -> list[str]:
        """The published variants among those of an experiment, in the order of publication.

        Args:
            experiment: its name.
            evidence: ``measured`` or ``simulated``.
        """
        if evidence == "measured":
            asked = {run.cell.variant for run in self.runs[experiment]}
        else:
            workload = self.simulated.get(experiment)
            asked = {cell.variant for cell in workload.cells()} if workload else set()
        return [variant for variant in PUBLISHED if variant in asked]


def make_plan(config: Mapping[str, Any], files: Sequence[str]) -> Plan:
    """The runs that a configuration asks for on this machine.

    Args:
        config: settings as Snakemake merged them from files and ``--config``.
        files: the configuration files among its sources, checked first: their problems name file and key.

    Raises:
        ConfigError: settings are wrong; carries all problems.
        DeviceCountError: the configuration asks for GPUs and there are none.
    """
    load_config(files)
    suite = parse_config(config, source="--config")
    names = SuiteConfig.experiments()
    workloads = {name: suite.experiment(name).simulation() for name in names}
    return Plan(
        {name: experiment_cells(suite, name) for name in names},
        {name: workload for name, workload in workloads.items() if workload},
    )
