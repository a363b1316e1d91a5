"""What the Snakefile asks the package: which runs there are, with which options. Imports no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpipe_bench.bench.experiments.config import SuiteConfig, load_config, parse_config, read_config
from gpipe_bench.bench.running.simulation_groups import CellGroup, group_cells
from gpipe_bench.bench.spec.cell_files import cells_text
from gpipe_bench.bench.spec.cells import CellRun, MeasuredCell
from gpipe_bench.bench.spec.emulated_cells import EmulatedCell
from gpipe_bench.bench.spec.experiment import Experiment
from gpipe_bench.bench.spec.machine import find_machine
from gpipe_bench.bench.spec.simulated_cells import SimulatedCell
from gpipe_bench.components import PUBLISHED
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.table import model_digest
from gpipe_bench.results.catalogue import (
    DrawnFigure,
    reference_companions,
    reference_figures,
    reference_tables,
    run_figures,
)
from gpipe_bench.results.rows import EVIDENCE
from gpipe_bench.util.files import write_files

REDRAWN: Final = Path("figures/redrawn")
"""Where figures of the reference tables are drawn."""

TABLE_PATTERN: Final = "results/simulated/published-{table}.json"
"""Where the simulations of a published table lie."""


@dataclass(frozen=True, slots=True)
class TimedJob:
    """What one job measures.

    Attributes:
        cells: one, or several that take turns.
        repeats: how often each is run.
    """

    cells: list[MeasuredCell]
    repeats: int

    @property
    def only(self) -> str:
        """The keys of its cells, as ``--only`` takes them."""
        return ",".join(cell.id for cell in self.cells)

    @property
    def accelerators(self) -> int:
        """How many it needs."""
        return max(cell.accelerators for cell in self.cells)

    @property
    def hosts(self) -> int:
        """How many it needs."""
        return max(cell.hosts for cell in self.cells)


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """All runs of the suite on this machine.

    Attributes:
        runs: the measured runs of each experiment.
        simulated: the simulated cells of each experiment.
        groups: the jobs that simulate them.
        emulated: the emulated cells of each experiment.
        emulating: the jobs that emulate them.
        tables: the published tables that each experiment simulates.
        parts: experiments and requests for advice that do not ask for all simulations of the defaults, which the
            reference results hold.
        advice: for each request for advice its settings as JSON.
        advice_models: for each request a digest of the files of its model, if that is the user's own.
        unverified: experiments that take too long for ``verify``.
        device: where to measure.
        gpus: how many accelerators there are; 0 on a CPU.
    """

    runs: dict[str, list[CellRun]]
    simulated: dict[str, list[SimulatedCell]] = field(default_factory=dict)
    groups: list[CellGroup[SimulatedCell]] = field(default_factory=list)
    emulated: dict[str, list[EmulatedCell]] = field(default_factory=dict)
    emulating: list[CellGroup[EmulatedCell]] = field(default_factory=list)
    tables: dict[str, Sequence[str]] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    advice: dict[str, str] = field(default_factory=dict)
    advice_models: dict[str, str] = field(default_factory=dict)
    unverified: list[str] = field(default_factory=list)
    device: str = "cpu"
    gpus: int = 0

    @property
    def measured(self) -> dict[str, MeasuredCell]:
        """The measured cells by their keys, whatever experiments ask for them."""
        return {run.cell.id: run.cell for runs in self.runs.values() for run in runs}

    @property
    def jobs(self) -> dict[str, CellGroup[SimulatedCell] | CellGroup[EmulatedCell]]:
        """What is simulated or emulated in one process, by the names of the files."""
        groups: list[CellGroup[SimulatedCell] | CellGroup[EmulatedCell]] = [*self.groups, *self.emulating]
        return {group.id: group for group in groups}

    def write_cells(self, path: Path) -> None:
        """Write the file with all cells, from which each job takes its own."""
        virtual = [cell for job in self.jobs.values() for cell in job.cells]
        write_files({path: cells_text([*self.measured.values(), *virtual])})

    @property
    def timed(self) -> dict[str, TimedJob]:
        """What measures, by the names of the files; as often as the experiment asks that asks for most."""
        asked: dict[str, list[CellRun]] = {}
        for run in (run for runs in self.runs.values() for run in runs):
            asked.setdefault(run.job, []).append(run)
        return {
            name: TimedJob(list({run.cell.id: run.cell for run in runs}.values()), max(run.repeat for run in runs) + 1)
            for name, runs in asked.items()
        }

    @property
    def raw(self) -> dict[str, list[str]]:
        """For each experiment the raw results that it is made from; simulations first, then emulations."""
        return {experiment: self._raw(experiment) for experiment in self.runs}

    @property
    def cells(self) -> dict[str, str]:
        """For each experiment the digests of its simulated and emulated cells, which lie in files that others share."""
        found = {}
        for name in self.runs:
            names = [cell.id for cell in self.simulated.get(name, [])]
            names += [cell.id for cell in self.emulated.get(name, [])]
            found[name] = ",".join(cell.rpartition("-")[2] for cell in names) or "none"
        return found

    @property
    def sweeps(self) -> list[str]:
        """Names of the sweeps, as the configuration has them, and ``measured``; not that of processes."""
        names = [name.removeprefix("sweep_") for name in self.runs if name.startswith("sweep_")]
        return [name for name in names if name != "processes"]

    @property
    def reference_tables(self) -> list[str]:
        """The committed tables of rows."""
        return [str(path) for path in reference_tables()]

    @property
    def reference_lines(self) -> list[str]:
        """The committed tables whose lines ``verify`` asks for beside the rows."""
        names = ("predictions", "transparency_verdict")
        return [str(path) for name in names for path in reference_companions(name)]

    @property
    def reference_figures(self) -> list[str]:
        """The figures that are redrawn from those."""
        return [str(path) for figure in reference_figures() for path in figure.paths(REDRAWN)]

    @property
    def figures(self) -> dict[str, DrawnFigure]:
        """The figures of this run by the names of their files, one of each for each kind of evidence."""
        tables = {name: self._kinds(name) for name in self.runs}
        tables |= {_advice_table(name): ["simulated"] for name in self.advice}
        kinds = [kind for kind in EVIDENCE[1:] if "ablation" in self.runs and self.published("ablation", kind)]
        return run_figures(tables, kinds)

    def pictures(self, *tables: str, kind: str = "") -> list[str]:
        """The files of the figures of some tables, all of them or those of one kind."""
        asked = [one for one in self.figures.values() if one.table.stem in tables and kind in ("", one.kind)]
        return [str(path) for one in asked for path in one.paths(Path("figures"))]

    def _kinds(self, name: str) -> list[str]:
        """The kinds of evidence of an experiment that are drawn; the cells of a sweep that are emulated are too few."""
        found = ["simulated"] if self.simulated.get(name) or self.tables.get(name) else []
        found += ["emulated"] if self.emulated.get(name) and not name.startswith("sweep_") else []
        return [*found, *(["measured"] if self.runs[name] else [])]

    @property
    def verified(self) -> list[str]:
        """The experiments and requests for advice with a simulated reference table."""
        known = {path.stem for path in reference_tables() if path.parent.parent.name == "simulated"}
        known -= {*self.unverified}
        return [name for name in (*self.runs, *map(_advice_table, self.advice)) if name in known]

    @property
    def allowed_parts(self) -> list[str]:
        """Options of ``verify``: the tables that may lack cells of the reference."""
        return [word for name in self.verified if name in self.parts for word in ("--part", name)]

    def published(self, experiment: str, evidence: str = "measured") -> list[str]:
        """The published variants among those of an experiment, in the order of publication.

        Args:
            experiment: its name.
            evidence: ``measured``, ``simulated`` or ``emulated``.
        """
        if evidence == "measured":
            asked = {run.cell.variant for run in self.runs[experiment]}
        else:
            asked = {cell.variant for cell in self.simulated.get(experiment, [])}
        if evidence == "emulated":
            asked = {cell.variant for cell in self.emulated.get(experiment, [])}
        return [variant for variant in PUBLISHED if variant in asked]

    def _raw(self, experiment: str) -> list[str]:
        wanted = {cell.id for cell in self.simulated.get(experiment, [])}
        emulated = {cell.id for cell in self.emulated.get(experiment, [])}
        return [
            *(group.path for group in self.groups if any(cell.id in wanted for cell in group.cells)),
            *(group.path for group in self.emulating if any(cell.id in emulated for cell in group.cells)),
            *(TABLE_PATTERN.format(table=table) for table in self.tables.get(experiment, ())),
            *dict.fromkeys(str(run.path) for run in self.runs[experiment]),
        ]


def named_by(wildcard: str, table: Mapping[str, Any], attribute: str = "") -> Callable[[Any], Any]:
    """A function for Snakemake that takes the value of a wildcard and gives its entry in a table of the plan.

    Snakemake's own ``lookup`` does the same, but compares every key of the table each time.

    Args:
        wildcard: its name.
        table: of the plan.
        attribute: to give in place of the entry.
    """

    def entry(wildcards: Any) -> Any:
        found = table[getattr(wildcards, wildcard)]
        return getattr(found, attribute) if attribute else found

    return entry


def make_plan(config: Mapping[str, Any], files: Sequence[str]) -> SuitePlan:
    """The runs that a configuration asks for on this machine.

    Args:
        config: settings as Snakemake merged them from files and ``--config``.
        files: the configuration files among its sources, checked first: their problems name file and key.

    Raises:
        ConfigError: settings are wrong; carries all problems.
        DeviceCountError: the configuration asks for GPUs and there are none.
    """
    suite = _checked(config, files)
    machine = find_machine(suite.device, suite.device_count)
    experiments = suite.experiments()
    simulated = {name: experiment.simulations() for name, experiment in experiments.items()}
    emulated = {name: experiment.emulations() for name, experiment in experiments.items()}
    asked = [(simulated[name], experiment.timelines) for name, experiment in experiments.items()]
    emulating = [(emulated[name], experiment.timelines) for name, experiment in experiments.items()]
    return SuitePlan(
        {name: suite.runs(name, machine) for name in experiments},
        simulated,
        group_cells(asked),
        emulated,
        group_cells(emulating),
        {name: experiment.tables() for name, experiment in experiments.items()},
        [*_parts(experiments), *_parts_of_advice(suite)],
        {name: request.model_dump_json() for name, request in suite.advice.items()},
        {name: model_digest(request.model) for name, request in suite.advice.items()},
        [name for name, experiment in experiments.items() if not experiment.verified],
        machine.device,
        0 if machine.device == "cpu" else machine.count,
    )


def _checked(config: Mapping[str, Any], files: Sequence[str]) -> SuiteConfig:
    """The merged settings; what is wrong in a file is said once, of that file."""
    for file in files:
        # Of a file that is no plain YAML Snakemake may have made anything: its settings are not looked at.
        read_config(Path(file))
    problems: list[str] = []
    try:
        load_config(files)
    except ConfigError as error:
        problems += error.problems
    known = {problem.partition(": ")[2] for problem in problems}
    try:
        suite = parse_config(config, source="--config")
    except ConfigError as error:
        problems += [problem for problem in error.problems if problem.partition(": ")[2] not in known]
    if problems:
        raise ConfigError(problems)
    return suite


def _parts(experiments: Mapping[str, Experiment]) -> list[str]:
    """The experiments in which a simulation of the default configuration is missing."""
    found = []
    for name, default in SuiteConfig().experiments().items():
        own = experiments.get(name)
        if own is not None and own != default:
            cells, tables = {cell.id for cell in own.simulations()}, set(own.tables())
            if not {cell.id for cell in default.simulations()} <= cells or not set(default.tables()) <= tables:
                found.append(name)
    return found


def _parts_of_advice(suite: SuiteConfig) -> list[str]:
    """The requests for advice that ask for something else than the default one of their name."""
    defaults = SuiteConfig().advice
    return [_advice_table(name) for name, asked in suite.advice.items() if asked != defaults.get(name, asked)]


def _advice_table(name: str) -> str:
    return f"advice_{name}"
