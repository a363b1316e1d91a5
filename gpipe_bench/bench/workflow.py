"""What the Snakefile asks the package: which runs there are, with which options. Imports no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_bench.bench.cells import CellRun, experiment_cells
from gpipe_bench.bench.config import SuiteConfig, load_config, parse_config
from gpipe_bench.components import PUBLISHED

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """All runs of the suite on this machine.

    Attributes:
        runs: the runs of each experiment.
    """

    runs: dict[str, list[CellRun]]

    @property
    def arguments(self) -> dict[str, list[str]]:
        """For each cell, whatever experiment asks for it, the options of ``python -m gpipe_bench run``."""
        return {run.cell.id: run.cell.arguments() for runs in self.runs.values() for run in runs}

    @property
    def raw(self) -> dict[str, list[str]]:
        """For each experiment the raw results that it is made from."""
        return {experiment: [str(run.path) for run in runs] for experiment, runs in self.runs.items()}

    def published(self, experiment: str) -> list[str]:
        """The published variants among those of an experiment, in the order of publication."""
        asked = {run.cell.variant for run in self.runs[experiment]}
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
    return Plan({experiment: experiment_cells(suite, experiment) for experiment in SuiteConfig.experiments()})
