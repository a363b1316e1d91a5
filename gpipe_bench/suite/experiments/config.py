"""The suite's configuration: experiments as data, checked as a whole, all problems reported at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from gpipe_bench.data import DEFAULT_CONFIG
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.catalogue import COMPANION_SUFFIXES
from gpipe_bench.settings import whole
from gpipe_bench.suite.advice.advice import AdviceRequest
from gpipe_bench.suite.experiments.grid import (
    DERIVED,
    EACH,
    KINDS,
    OF_THE_MACHINE,
    WORDS,
    Block,
    Experiment,
    below,
    read_experiment,
)
from gpipe_bench.suite.names import readable
from gpipe_bench.suite.settings import Problem, Section
from gpipe_bench.suite.validation import validated
from gpipe_bench.util.nearest import nearest
from gpipe_bench.util.yaml_text import read_yaml_file

CONFIG_PATH: Final = Path("config/config.yaml")
"""The configuration of the working folder; where there is none, that of the package."""

SCHEMA_PATH: Final = Path("config/schema.json")

DeviceChoice = Annotated[
    Literal["auto", "cpu", "cuda"],
    Field(description="where to measure; auto: on the GPUs where there are some, else on the CPU"),
]
DeviceCount = Annotated[int, whole("with device cuda: GPUs that jobs get on a cluster; 0: count them here", 0, 4096)]
_TAKEN: Final = ("predictions", "verify", "peers", "transparency")
"""Tables of rules that are no experiments."""

_WIDTH: Final = 160
_OLD: Final = ("ablation", "speed", "memory", "sweep", "schedules")
_NEW: Final = (
    "experiments: {sweep_mine: {grid: {run: simulated, model: unet, partitions: [1, 2, 4], chunks: [1, 4, 16], "
    "batch_size: 64}}}"
)


_Free = dict[str, Any]
_NOTHING: Final[_Free] = {}


class _Sections(Section):
    """What a configuration has beside experiments."""

    device: DeviceChoice = "auto"
    device_count: DeviceCount = 0
    common: Annotated[_Free, Field(description="parts of blocks, for YAML's & and *; not looked at")] = _NOTHING
    experiments: Annotated[dict[str, dict[str, Any] | None], Field(max_length=64)]
    advice: Annotated[
        dict[str, AdviceRequest | None],
        Field(max_length=64, description="the best balance, chunks and mode; a request of yours is a new key"),
    ]
    transparency: Annotated[
        _Free, Field(description="training on real images: settings of the study, see studies/training")
    ] = _NOTHING
    peers: Annotated[_Free, Field(description="the race of peers: settings of the study, see studies/peers")] = _NOTHING

    def problems(self) -> Iterator[Problem]:
        """Names of experiments and of requests are parts of file names."""
        for name in self.advice:
            if readable(name) != name:
                text = f"must have names of lower-case letters, digits and hyphens, got {name!r}; rename it"
                yield Problem(("advice",), text)
        for name in self.experiments:
            taken = name in _TAKEN or name.endswith(COMPANION_SUFFIXES) or name.startswith("advice_")
            if taken or readable(name.replace("_", "-")) != name.replace("_", "-"):
                rule = "must have names of lower-case letters, digits, hyphens and _, which no other table has"
                yield Problem(("experiments",), f"{rule}, got {name!r}; rename it")


@dataclass(frozen=True)
class SuiteConfig:
    """What the suite runs.

    Attributes:
        device: where to measure: ``auto``, ``cpu`` or ``cuda``.
        device_count: GPUs that jobs get on a cluster; 0: those of this machine.
        experiments: by the names of their tables of results.
        advice: requests for advice by their names.
        blocks: the experiments as data.
    """

    device: str
    device_count: int
    experiments: Mapping[str, Experiment]
    advice: Mapping[str, AdviceRequest]
    blocks: Mapping[str, Mapping[str, Any]]

    def experiment(self, name: str) -> Experiment:
        """The experiment of a name.

        Raises:
            ConfigError: there is none of that name.
        """
        if name not in self.experiments:
            hint = nearest(name, self.experiments)
            raise ConfigError([f"experiment must be one of {', '.join(self.experiments)}, got {name!r}; {hint}"])
        return self.experiments[name]


def base_config() -> Path:
    """The file that others are merged into: that of the working folder, or else that of the package."""
    return CONFIG_PATH if CONFIG_PATH.is_file() else DEFAULT_CONFIG


def load_config(paths: Iterable[Path | str] = ()) -> SuiteConfig:
    """The base configuration with ``paths`` merged into it, later files over earlier ones.

    Sections are merged, and everything else is replaced, as Snakemake does with its ``--configfile``.

    Raises:
        ConfigError: a file cannot be read or settings are wrong; carries all problems, each with file and key.
    """
    data, origins, problems = merged_files(paths)
    try:
        config = parse_config(data, origins=origins)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return config


def merged_files(paths: Iterable[Path | str]) -> tuple[dict[str, Any], dict[tuple[str, ...], str], list[str]]:
    """The base configuration with ``paths`` merged into it, the file of each setting, and why files cannot be read."""
    data: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    problems: list[str] = []
    for path in (base_config(), *map(Path, paths)):
        try:
            _merge(data, read_config(path), str(path), origins)
        except ConfigError as error:
            problems += error.problems
    return data, origins, problems


def parse_config(
    data: Mapping[str, Any], source: str = "config", origins: Mapping[tuple[str, ...], str] | None = None
) -> SuiteConfig:
    """The configuration in plain data; experiments and advice that are left out are those of :func:`base_config`.

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

    if old := [key for key in _OLD if key in data]:
        rule = f"must be below the key experiments, as blocks whose lists are axes, got {', '.join(old)} at the top"
        raise ConfigError([f"{name((old[0],)).partition(': ')[0]}: experiments {rule}; write them like {_NEW}"])
    if not {"experiments", "advice"} <= set(data):
        data = {**{key: value for key, value in read_config(base_config()).items() if key in _BASE}, **data}
    problems: list[str] = []
    try:
        sections = validated(_Sections, data, name)
    except ConfigError as error:
        problems += error.problems
    experiments: dict[str, Experiment] = {}
    given = data["experiments"] if isinstance(data["experiments"], Mapping) else {}
    for key, blocks in given.items():
        try:
            if isinstance(blocks, Mapping):
                experiments[key] = read_experiment(blocks, partial(below, name, "experiments", key))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    advice = {key: request for key, request in sections.advice.items() if request}
    return SuiteConfig(sections.device, sections.device_count, experiments, advice, given)


_BASE: Final = ("common", "experiments", "advice")


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
            into[key] = {**into[key]} if isinstance(into.get(key), dict) else {}
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


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file: a setting of a block is that of a cell, or a list of its values."""
    sections = _Sections.model_json_schema(mode="validation")
    block: dict[str, Any] = {"type": "object", "additionalProperties": False, "required": ["run"], "properties": {}}
    settings: dict[str, dict[str, Any]] = {}
    for kind in KINDS.values():
        for key, setting in kind.model_json_schema(mode="validation")["properties"].items():
            settings.setdefault(key, setting)
    for key, setting in settings.items():
        if key not in OF_THE_MACHINE:
            said = {name: setting.pop(name, None) for name in ("title", "default", "description")}
            words: list[dict[str, Any]] = [{"enum": [*WORDS[key]]}] if key in WORDS else []
            words += [{"const": "whole"}] if key == "balance" else []
            one = {"anyOf": [setting, *words]} if words else setting
            block["properties"][key] = {"description": said["description"], **_axis(one)}
    block["properties"] |= {key: {"description": one.help, **_axis(one.schema)} for key, one in DERIVED.items()}
    block["properties"]["each"] = {
        "description": EACH,
        "type": "array",
        "minItems": 1,
        "items": {"type": "object"},
    }
    for key, setting in Block.model_json_schema(mode="validation")["properties"].items():
        block["properties"][key] = {name: value for name, value in setting.items() if name != "title"}
    for key in block["properties"].keys() - {"run"}:
        setting = block["properties"][key]
        said = {"description": setting.pop("description")}
        block["properties"][key] = {**said, "anyOf": [*setting.pop("anyOf", [setting]), {"type": "null"}]}
    blocks = {"additionalProperties": {"anyOf": [{"$ref": "#/$defs/Block"}, {"type": "null"}]}, "type": "object"}
    sections["properties"]["experiments"] = {
        "type": "object",
        "description": "each a table of results, made of blocks",
        "additionalProperties": {"anyOf": [blocks, {"type": "null"}]},
    }
    sections["$defs"]["Block"] = block
    sections.pop("required", None)
    # Snakemake reads a schema made by pydantic only when it says which draft it is.
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **sections}


def _axis(setting: Mapping[str, Any]) -> dict[str, Any]:
    """A setting that may have several values."""
    return {"anyOf": [setting, {"type": "array", "minItems": 1, "items": setting}]}


def json_schema_text() -> str:
    """The text of ``config/schema.json``; what fits on a line stands on one."""
    return _json(json_schema()) + "\n"


def _json(value: Any, indent: str = "") -> str:
    text = json.dumps(value)
    if len(text) + len(indent) <= _WIDTH or not isinstance(value, dict | list):
        return text
    more = indent + "  "
    if isinstance(value, list):
        return "[\n" + ",\n".join(more + _json(one, more) for one in value) + f"\n{indent}]"
    lines = [f"{more}{json.dumps(key)}: {_json(one, more)}" for key, one in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
