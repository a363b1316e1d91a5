"""The suite's configuration: typed, checked as a whole, all problems reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from gpipe_bench.bench.advice.advice import AdviceRequest
from gpipe_bench.bench.experiments.experiments import Ablation, Sweeps
from gpipe_bench.bench.experiments.schedules import ScheduleComparison
from gpipe_bench.bench.published.tables import MemoryTables, SpeedTables
from gpipe_bench.bench.spec.cells import CellRun, distinct_runs
from gpipe_bench.bench.spec.experiment import Experiment
from gpipe_bench.bench.spec.machine import Machine, find_machine
from gpipe_bench.bench.spec.names import readable
from gpipe_bench.bench.spec.settings import Problem, Section
from gpipe_bench.bench.spec.validation import validated
from gpipe_bench.errors import ConfigError
from gpipe_bench.util.nearest import nearest
from gpipe_bench.util.yaml_text import read_yaml_file

DeviceChoice = Annotated[
    Literal["auto", "cpu", "cuda"],
    Field(description="where to measure; auto: on the GPUs where there are some, else on the CPU"),
]


DeviceCount = Annotated[
    int,
    Field(
        strict=True, ge=0, le=4096, description="with device cuda: GPUs that jobs get on a cluster; 0: count them here"
    ),
]


_ADVICE: dict[str, AdviceRequest] = {"unet": AdviceRequest()}
_DEFAULTS: dict[str, Any] = {}  # a study checks its own settings


class SuiteConfig(Section):
    """What the suite runs."""

    device: DeviceChoice = "auto"
    device_count: DeviceCount = 0
    ablation: Annotated[Ablation, Field(description="each component of the pipeline switched on and off")] = Ablation()
    speed: Annotated[SpeedTables, Field(description="the published tables of throughput")] = SpeedTables()
    memory: Annotated[MemoryTables, Field(description="the published tables of memory")] = MemoryTables()
    sweep: Annotated[Sweeps, Field(description="numbers of partitions and micro-batches")] = Sweeps()
    schedules: Annotated[ScheduleComparison, Field(description="every schedule on the same devices")] = (
        ScheduleComparison()
    )
    advice: Annotated[
        dict[str, AdviceRequest],
        Field(max_length=64, description="the best balance, chunks and mode; a request of yours is a new key"),
    ] = _ADVICE
    transparency: Annotated[
        dict[str, Any], Field(description="training on real images: settings of the study, see studies/training")
    ] = _DEFAULTS
    peers: Annotated[
        dict[str, Any], Field(description="the race of peers: settings of the study, see studies/peers")
    ] = _DEFAULTS

    def problems(self) -> Iterator[Problem]:
        """Names of requests are parts of file names."""
        for name in self.advice:
            if readable(name) != name:
                text = f"must have names of lower-case letters, digits and hyphens, got {name!r}; rename it"
                yield Problem(("advice",), text)

    def experiments(self) -> dict[str, Experiment]:
        """The experiments that give tables of rows, by the name of their results."""
        single: dict[str, Experiment] = {"ablation": self.ablation, "speed": self.speed, "memory": self.memory}
        schedules: dict[str, Experiment] = {"schedules": self.schedules, "schedules_timelines": self.schedules.drawn}
        return {**single, **self.sweep.experiments(), **schedules}

    def experiment(self, name: str) -> Experiment:
        """The experiment of a name.

        Raises:
            ConfigError: there is none of that name.
        """
        known = self.experiments()
        if name not in known:
            hint = nearest(name, known)
            raise ConfigError([f"experiment must be one of {', '.join(known)}, got {name!r}; {hint}"])
        return known[name]

    def runs(self, name: str, device: Machine | str | None = None) -> list[CellRun]:
        """The runs that an experiment asks for on this machine, none twice.

        Args:
            name: of the experiment.
            device: where to measure: a machine, ``auto``, ``cpu`` or ``cuda``; by default what the configuration says.

        Raises:
            ConfigError: no such experiment.
            DeviceCountError: ``cuda`` was asked for and there is no GPU.
        """
        machine = device if isinstance(device, Machine) else find_machine(device or self.device, self.device_count)
        return distinct_runs(self.experiment(name).runs(machine))


def load_config(paths: Iterable[Path | str]) -> SuiteConfig:
    """The configuration in ``paths``, later files over earlier ones: sections are merged, everything else replaced.

    Raises:
        ConfigError: a file cannot be read or settings are wrong; carries all problems, each with file and key.
    """
    merged: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    problems: list[str] = []
    for path in map(Path, paths):
        try:
            _merge(merged, read_config(path), str(path), origins)
        except ConfigError as error:
            problems += error.problems
    try:
        config = parse_config(merged, origins=origins)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return config


def parse_config(
    data: Mapping[str, Any], source: str = "config", origins: Mapping[tuple[str, ...], str] | None = None
) -> SuiteConfig:
    """The configuration in plain data; what is left out has its default.

    Args:
        data: sections and settings, as from YAML.
        source: what to call it in messages.
        origins: the file of each setting that came from another source.

    Raises:
        ConfigError: settings are wrong; carries all problems.
    """

    def name(path: tuple[str, ...]) -> str:
        files = [origins[path[:end]] for end in range(len(path), 0, -1) if origins and path[:end] in origins]
        return f"{files[0] if files else source}: {'.'.join(path)}"

    return validated(SuiteConfig, data, name)


def _merge(
    into: dict[str, Any],
    data: Mapping[str, Any],
    source: str,
    origins: dict[tuple[str, ...], str],
    path: tuple[str, ...] = (),
) -> None:
    for key, value in data.items():
        here = (*path, key)
        origins[here] = source
        if isinstance(value, dict):
            into[key] = into[key] if isinstance(into.get(key), dict) else {}
            _merge(into[key], value, source, origins, here)
        else:
            into[key] = value


def read_config(path: Path) -> dict[str, Any]:
    """The sections and settings in one file, before they are checked.

    Raises:
        ConfigError: it cannot be read, or is no YAML of sections.
    """
    try:
        data = read_yaml_file(path)
    except OSError as error:
        raise ConfigError([f"configuration must be a readable file, got {path} ({error}); check the path"]) from error
    except ValueError as error:
        raise ConfigError(
            [f"configuration must be YAML, got an error in {path}: {error}; correct that line"]
        ) from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise ConfigError([f"configuration must be sections of settings, got {kind} in {path}; name a section"])
    return data
