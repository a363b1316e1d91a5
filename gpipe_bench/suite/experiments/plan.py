"""What the workflow runs: a configuration and a machine give a list of jobs, and tables that are made of their results.

A job is one process, which leaves one file. A measured cell is a job of its own, or those that take turns are one.
Simulated and emulated cells of one model share a process, which loads PyTorch and the model's traces once; a job is
small enough that little is lost when it is interrupted. What several experiments ask for is run once.

Imports no PyTorch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpipe_bench.components import PUBLISHED
from gpipe_bench.data import DEFAULT_CONFIG
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
from gpipe_bench.suite.advice.advice import AdviceRequest
from gpipe_bench.suite.cell_files import cells_text
from gpipe_bench.suite.cells import RAW_PATTERN, CellRun, MeasuredCell
from gpipe_bench.suite.emulated_cells import EmulatedCell
from gpipe_bench.suite.experiments.config import SuiteConfig, merged_files, parse_config, read_config
from gpipe_bench.suite.experiments.grid import Cell, Experiment, read_experiment
from gpipe_bench.suite.machine import Machine, find_machine
from gpipe_bench.suite.names import model_word, readable
from gpipe_bench.suite.simulated_cells import SimulatedCell
from gpipe_bench.util.files import write_files

REDRAWN: Final = Path("figures/redrawn")
"""Where figures of the reference tables are drawn."""

SIMULATED_PATTERN: Final = "results/simulated/{group}.json"
"""Where the raw results of a job that simulates lie."""

EMULATED_PATTERN: Final = "results/emulated/{group}.json"
"""Where those of a job that emulates lie."""

TABLE_PATTERN: Final = "results/simulated/published-{table}.json"
"""Where the simulations of a published table lie."""

GROUP_PATTERN: Final = r"[a-z0-9-]+"
"""Regular expression of the name of every job that simulates or emulates."""

PATTERNS: Final = {
    "measured": RAW_PATTERN.replace("{cell}", "{name}"),
    "simulated": SIMULATED_PATTERN.replace("{group}", "{name}"),
    "emulated": EMULATED_PATTERN.replace("{group}", "{name}"),
    "published": TABLE_PATTERN.replace("{table}", "{name}"),
}
"""Where the raw results of a job lie, by what it does."""

OF_A_CELL: Final = ("partitions", "chunks", "batch_size", "checkpoint", "variant", "balance", "schedule")
"""Settings that cells of one job have of their own."""

UNVERIFIED: Final = (
    "schedules",
    "schedules_timelines",
    "residuals",
    "residuals_float32",
    "residuals_components",
)
"""Experiments that take too long for ``verify``."""

_SMALL: Final = 32
_MOST: Final = 150

_NAMED: Final = 3
"""Pipelines of a job that are named, at most."""


@dataclass(frozen=True)
class Job:
    """What one process runs.

    Attributes:
        evidence: ``measured``, ``simulated``, ``emulated``; ``published`` simulates a table as it was run.
        name: of the file of its results.
        cells: in the order in which they were asked for; none of a published table.
        repeats: how often each is run.
        timelines: keys of the cells whose timelines are kept.
    """

    evidence: str
    name: str
    cells: Sequence[Cell] = ()
    repeats: int = 1
    timelines: frozenset[str] = frozenset()

    @property
    def path(self) -> str:
        """Where the results lie, below the folder of the run."""
        return PATTERNS[self.evidence].format(name=self.name)

    @property
    def only(self) -> str:
        """The keys of its cells, as ``--only`` takes them."""
        return ",".join(cell.id for cell in self.cells)

    @property
    def words(self) -> str:
        """What it does, such as ``measuring 1f1b, 3 repeats`` or ``simulating 64 cells of unet on p40``."""
        if self.evidence == "measured":
            ways = dict.fromkeys(cell.schedule or cell.variant for cell in self.cells)
            what = ", ".join(ways) if len(ways) <= _NAMED else f"{len(self.cells)} pipelines in turns"
            return f"measuring {what}, {self.repeats} repeat{'s' if self.repeats > 1 else ''}"
        verb = self.evidence.removesuffix("ed") + "ing"
        model, profile = (getattr(self.cells[0], name) for name in ("model", "profile"))
        return f"{verb} {len(self.cells)} cell{'s' * (len(self.cells) > 1)} of {model} on {profile}"

    @property
    def kept(self) -> str:
        """The keys of the cells whose timelines are kept, in their order, as ``--timelines`` takes them."""
        return ",".join(cell.id for cell in self.cells if cell.id in self.timelines) or "none"

    @property
    def profile(self) -> str:
        """The file of its hardware profile, of a job that simulates or emulates."""
        paths = (cell.profile_path for cell in self.cells if not isinstance(cell, MeasuredCell))
        return str(Path(next(paths)).absolute())

    @property
    def accelerators(self) -> int:
        """How many it needs, of a job that measures."""
        return max(cell.accelerators for cell in self.cells if isinstance(cell, MeasuredCell))

    @property
    def hosts(self) -> int:
        """How many it needs, of a job that measures."""
        return max(cell.hosts for cell in self.cells if isinstance(cell, MeasuredCell))


@dataclass(frozen=True)
class Table:
    """What the table of one experiment is made from.

    Attributes:
        runs: what is measured.
        simulated: the cells that are simulated.
        emulated: those that are emulated.
        published: the published tables that are simulated as they were run.
        jobs: all of these; simulations first, then emulations.
    """

    runs: Sequence[CellRun]
    simulated: Sequence[SimulatedCell]
    emulated: Sequence[EmulatedCell]
    published: Sequence[str]
    jobs: Sequence[Job]

    @property
    def raw(self) -> list[str]:
        """The raw results that it is made from."""
        return [job.path for job in self.jobs]

    @property
    def digests(self) -> str:
        """The digests of its simulated and emulated cells, which lie in files that others share."""
        return ",".join(cell.id.rpartition("-")[2] for cell in (*self.simulated, *self.emulated)) or "none"

    def variants(self, evidence: str) -> list[str]:
        """The published variants among its cells of one kind of evidence, in the order of publication."""
        cells = [*(run.cell for run in self.runs), *self.simulated, *self.emulated]
        asked = {cell.variant for cell in cells if cell.evidence == evidence}
        return [variant for variant in PUBLISHED if variant in asked]


@dataclass(frozen=True)
class SuitePlan:
    """All that a configuration asks for on one machine.

    Attributes:
        machine: where to measure.
        jobs: in the order of the experiments.
        tables: of the experiments, by their names.
        advice: the requests for advice by their names.
        parts: tables that lack simulations of the default configuration, which the reference results hold.
    """

    machine: Machine
    jobs: Sequence[Job]
    tables: Mapping[str, Table]
    advice: Mapping[str, AdviceRequest] = field(default_factory=dict)
    parts: Sequence[str] = ()

    @property
    def gpus(self) -> int:
        """How many accelerators there are; 0 on a CPU."""
        return 0 if self.machine.device == "cpu" else self.machine.count

    def named(self, *evidence: str) -> dict[str, Job]:
        """The jobs of some kinds by their names."""
        return {job.name: job for job in self.jobs if job.evidence in evidence}

    def write_cells(self, folder: Path) -> Path:
        """A file in a folder with all cells, from which each job takes its own; written where it is not there yet."""
        text = cells_text([cell for job in self.jobs for cell in job.cells])
        path = folder / f"cells-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        if not path.is_file():
            write_files({path: text})
        return path

    @property
    def sweeps(self) -> list[str]:
        """The experiments that sweep, but for that of processes."""
        return [name for name in self.tables if name.startswith("sweep_") and name != "sweep_processes"]

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
        tables = {}
        for name, table in self.tables.items():
            # The cells of a sweep that are emulated are too few.
            drawn = {
                "simulated": table.simulated or table.published,
                "emulated": table.emulated and not name.startswith("sweep_"),
                "measured": table.runs,
            }
            tables[name] = [kind for kind, wanted in drawn.items() if wanted]
        tables |= {_advice_table(name): ["simulated"] for name in self.advice}
        kinds = [kind for kind in EVIDENCE[1:] if self.published("ablation", kind)]
        return run_figures(tables, kinds)

    def pictures(self, *tables: str, kind: str = "") -> list[str]:
        """The files of the figures of some tables, all of them or those of one kind."""
        asked = [one for one in self.figures.values() if one.table.stem in tables and kind in ("", one.kind)]
        return [str(path) for one in asked for path in one.paths(Path("figures"))]

    @property
    def verified(self) -> list[str]:
        """The experiments and requests for advice with a simulated reference table."""
        known = {path.stem for path in reference_tables() if path.parent.parent.name == "simulated"} - {*UNVERIFIED}
        return [name for name in (*self.tables, *map(_advice_table, self.advice)) if name in known]

    @property
    def allowed_parts(self) -> list[str]:
        """Options of ``verify``: the tables that may lack cells of the reference."""
        return [word for name in self.verified if name in self.parts for word in ("--part", name)]

    def published(self, experiment: str, evidence: str = "measured") -> list[str]:
        """The published variants of an experiment, none where there is no such experiment."""
        return self.tables[experiment].variants(evidence) if experiment in self.tables else []


def plan(config: SuiteConfig, machine: Machine) -> SuitePlan:
    """The jobs that a configuration asks for on a machine, and the tables that are made of them."""
    experiments = config.experiments
    runs = {name: experiment.runs(machine) for name, experiment in experiments.items()}
    timelines = {key for experiment in experiments.values() for key in experiment.timelines}
    simulating = list(_virtual_jobs("simulated", (one.simulated for one in experiments.values()), timelines))
    emulating = list(_virtual_jobs("emulated", (one.emulated for one in experiments.values()), timelines))
    measuring = list(_measured_jobs([run for found in runs.values() for run in found]))
    printed = {table: Job("published", table) for one in experiments.values() for table in one.tables}
    tables = {}
    for name, one in experiments.items():
        wanted = {cell.id for cell in (*one.simulated, *one.emulated)}
        virtual = [job for job in (*simulating, *emulating) if any(cell.id in wanted for cell in job.cells)]
        own = {run.job for run in runs[name]}
        measured = [job for job in measuring if job.name in own]
        jobs = [*virtual, *(printed[table] for table in one.tables), *measured]
        tables[name] = Table(runs[name], one.simulated, one.emulated, one.tables, jobs)
    jobs = [*simulating, *emulating, *printed.values(), *measuring]
    return SuitePlan(machine, jobs, tables, config.advice, _parts(config))


def _measured_jobs(runs: Iterable[CellRun]) -> Iterator[Job]:
    """A job for each cell, or for cells that take turns; as often as the experiment asks that asks for most."""
    asked: dict[str, list[CellRun]] = {}
    for run in runs:
        asked.setdefault(run.job, []).append(run)
    for name, found in asked.items():
        cells: dict[str, MeasuredCell] = {run.cell.id: run.cell for run in found}
        yield Job("measured", name, [*cells.values()], max(run.repeat for run in found) + 1)


def _virtual_jobs(
    evidence: str, asked: Iterable[Sequence[SimulatedCell] | Sequence[EmulatedCell]], timelines: set[str]
) -> Iterator[Job]:
    """The jobs that simulate or emulate all cells, none twice."""
    buckets: dict[str, list[SimulatedCell | EmulatedCell]] = {}
    for cell in {cell.id: cell for cells in asked for cell in cells}.values():
        buckets.setdefault(_bucket(cell), []).append(cell)
    for name, members in buckets.items():
        parts = [members[start : start + _MOST] for start in range(0, len(members), _MOST)]
        for k, part in enumerate(parts):
            kept = frozenset({cell.id for cell in part} & timelines)
            yield Job(evidence, f"{name}-{k}" if len(parts) > 1 else name, part, timelines=kept)


def _bucket(cell: SimulatedCell | EmulatedCell) -> str:
    """The same for cells that share traces; pipelines of many partitions take long and are kept apart."""
    shared: Mapping[str, Any] = {name: value for name, value in cell.settings().items() if name not in OF_A_CELL}
    digest = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:8]
    size = f"n{cell.partitions}" if cell.partitions > _SMALL else f"n1-{_SMALL}"
    return f"{model_word(cell.model)}-{readable(str(cell.profile))}-{size}-{digest}"


def of_wildcard(wildcard: str, table: Mapping[str, Any], attribute: str = "") -> Callable[[Any], Any]:
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
    """The plan of a configuration on this machine.

    Args:
        config: settings as Snakemake merged them from files and ``--config``.
        files: the configuration files among its sources, checked first: their problems name file and key.

    Raises:
        ConfigError: settings are wrong; carries all problems.
        DeviceCountError: the configuration asks for GPUs and there are none.
    """
    data, origins, problems = merged_files(files)
    if problems:
        # Of a file that is no plain YAML Snakemake may have made anything: its settings are not looked at.
        raise ConfigError(problems)
    origins = {path: file for path, file in origins.items() if data[path[0]] == config.get(path[0])}
    suite = parse_config(config, source="--config", origins=origins)
    return plan(suite, find_machine(suite.device, suite.device_count))


def _parts(config: SuiteConfig) -> list[str]:
    """The experiments and requests that lack a simulation of the default configuration of their name."""
    default = read_config(DEFAULT_CONFIG)
    found = []
    for name, blocks in default["experiments"].items():
        if name in config.experiments and config.blocks[name] != blocks:
            usual = read_experiment(blocks, ".".join)
            if not _simulations(usual) <= _simulations(config.experiments[name]):
                found.append(name)
    for name, request in default["advice"].items():
        if name in config.advice and config.advice[name] != AdviceRequest.model_validate(request):
            found.append(_advice_table(name))
    return found


def _simulations(experiment: Experiment) -> set[str]:
    return {*(cell.id for cell in experiment.simulated), *experiment.tables}


def _advice_table(name: str) -> str:
    return f"advice_{name}"


def advice_settings(plan: SuitePlan) -> dict[str, str]:
    """For each request for advice its settings as JSON."""
    return {name: request.model_dump_json() for name, request in plan.advice.items()}


def advice_models(plan: SuitePlan) -> dict[str, str]:
    """For each request for advice a digest of the files of its model, if that is the user's own."""
    return {name: model_digest(request.model) for name, request in plan.advice.items()}
