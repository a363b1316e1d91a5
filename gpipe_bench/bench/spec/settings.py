"""The settings of a cell: types, rules, units and defaults in one place.

The command line, the configuration file, its schema and its comments are all made from what stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema, model_validator

from gpipe_bench.components import Components
from gpipe_bench.errors import ScheduleError
from gpipe_bench.models.own_files import portable
from gpipe_bench.results.configurations import canonical, digest
from gpipe_bench.schedules.table import (
    SCHEDULES,
    file_schedule,
    is_schedule_file,
)
from gpipe_bench.util import choices
from gpipe_bench.util.nearest import nearest

T = TypeVar("T")

AUTO: Final = "auto"
"""A setting that is found where the run takes place."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A rule that settings of one section break together.

    Attributes:
        fields: the settings that the rule is about; the first one is named in the message.
        text: ``must be <rule>, got <value>; <what to change>``, or a sentence with a subject of its own.
    """

    fields: tuple[str, ...]
    text: str

    def message(self, name: str) -> str:
        """The problem in words.

        Args:
            name: what to call the first setting.
        """
        return f"{name}{' ' if self.text.startswith('must ') else ': '}{self.text}"


class Section(BaseModel):
    """A group of settings; unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def problems(self) -> Iterator[Problem]:
        """Rules between settings that are each valid on their own."""
        yield from ()

    def settings(self) -> dict[str, Any]:
        """All settings as plain data."""
        return self.model_dump(mode="json")

    def changed(self, **settings: Any) -> Self:
        """The same section with other settings."""
        return type(self).model_validate({**self.model_dump(), **settings})

    def shared(self, kind: type[Section]) -> dict[str, Any]:
        """The settings that ``kind`` has as well."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in kind.model_fields}

    @cached_property
    def configuration(self) -> str:
        """All settings as text; see :mod:`gpipe_bench.results.configurations`."""
        return canonical(self.settings())

    @cached_property
    def config_sha256(self) -> str:
        """Digest of :attr:`configuration`."""
        return digest(self.configuration)


def each_valid(entries: Iterable[Any], read: Callable[[Any], T]) -> list[T]:
    """What ``read`` makes of each entry of a list.

    Raises:
        ValueError: of one or more of them; a line each.
    """
    found, problems = [], []
    for entry in entries:
        try:
            found.append(read(entry))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return found


def read_balance(value: Any) -> Any:
    """Accept the form of tables and of the command line, ``34-76-70-61``, beside a list."""
    parts = str(value).split("-") if isinstance(value, str | int) and not isinstance(value, bool) else value
    if not isinstance(parts, list | tuple) or not parts:
        raise ValueError(f"must be layers per partition like 34-76-70-61, got {value!r}; give a number per partition")
    try:
        sizes = [int(str(part)) for part in parts]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ValueError(f"must be positive numbers of layers, got {value!r}; write them like 34-76-70-61")
    return tuple(sizes)


def _auto_balance(value: Any) -> Any:
    return () if value == AUTO or value in ((), []) else read_balance(value)


def _variant(value: Any) -> Any:
    try:
        return Components.from_label(str(value)).label
    except ValueError as error:
        raise ValueError(str(error).removeprefix("variant ")) from error


def _schedule(value: Any) -> Any:
    if is_schedule_file(value):
        try:
            file_schedule(value)
        except ScheduleError as error:
            rule = "must be of docs/schedules.md, or a CSV file with a schedule that can run"
            raise ValueError("\n".join(f"{rule}, got {value!r}: {problem}" for problem in error.problems)) from error
    elif value is not None and value not in SCHEDULES:
        rule = f"must be one of {', '.join(SCHEDULES)}, or a CSV file"
        raise ValueError(f"{rule}, got {value!r}; {nearest(str(value), SCHEDULES)}")
    return value


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {value!r}; write one")  # noqa: TRY004 - pydantic wants a ValueError
    return value


no_boolean: Final = BeforeValidator(_no_boolean)
"""For a number, for which in Python ``True`` would do."""
BALANCE_SCHEMA: Final = {
    "anyOf": [
        {"type": "string", "pattern": r"^[1-9][0-9]*(-[1-9][0-9]*)*$"},
        {"type": "integer", "minimum": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
    ]
}

Model = Annotated[
    str,
    BeforeValidator(lambda name: portable(name) if isinstance(name, str) else name),
    Field(description="name in the table of models, or file.py:function"),
]
ModelArgs = Annotated[str, Field(description="arguments of the model, 'key=value' joined by ';'")]
BatchSize = Annotated[int, Field(strict=True, ge=1, le=10**9, description="samples per step")]
Chunks = Annotated[int, Field(strict=True, ge=1, le=65_536, description="micro-batches per step")]
Partitions = Annotated[
    int, Field(strict=True, ge=1, le=4096, description="contiguous groups of layers, each with a worker of its own")
]
Balance = Annotated[
    tuple[int, ...],
    BeforeValidator(read_balance),
    PlainSerializer(lambda sizes: "-".join(map(str, sizes)), return_type=str),
    WithJsonSchema(BALANCE_SCHEMA),
    Field(description="layers per partition, joined by '-'"),
]
AutoBalance = Annotated[
    tuple[int, ...],
    BeforeValidator(_auto_balance),
    PlainSerializer(lambda sizes: "-".join(map(str, sizes)) or AUTO, return_type=str),
    WithJsonSchema({"anyOf": [{"const": AUTO}, *BALANCE_SCHEMA["anyOf"]]}),
    Field(description="layers per partition, joined by '-'; auto: the fastest slowest partition"),
]
Checkpoint = Annotated[choices.Checkpoint, Field(description="micro-batches whose activations are recomputed")]
OptionalSchedule = Annotated[
    str | None,
    BeforeValidator(_schedule),
    WithJsonSchema({"anyOf": [{"enum": [*SCHEDULES]}, {"type": "string", "pattern": r"\.csv$"}, {"type": "null"}]}),
    Field(description="of docs/schedules.md, or a CSV file; null: autograd orders the backward pass"),
]
Threads = Annotated[int, Field(strict=True, ge=1, le=4096, description="CPU threads inside one operator")]
Tf32 = Annotated[
    bool, Field(strict=True, description="let CUDA round float32 products to TF32; published runs had none")
]
Warmup = Annotated[int, Field(strict=True, ge=0, le=10**6, description="untimed steps before the timed ones")]
Steps = Annotated[int, Field(strict=True, ge=1, le=10**6, description="timed steps of each repeat")]
Count = Annotated[int, Field(strict=True, ge=1, le=65_536)]
ChunkCounts = Annotated[tuple[Count, ...], Field(min_length=1, max_length=64, description="numbers of micro-batches")]
Modes = Annotated[
    tuple[choices.Checkpoint, ...],
    Field(min_length=1, max_length=3, description="checkpoint modes"),
]
# PyTorch takes 64 bits; a row's column is a signed integer.
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63, description="seed of weights, data and dropout")]
Variant = Annotated[str, BeforeValidator(_variant), Field(description="label of the components, such as dep-str-ptl")]
Transfer = Annotated[
    choices.Transfer, Field(description="how tensors cross partitions: direct, or host for pinned memory")
]


class ModelSection(Section):
    """A section with ``model`` and ``model_args``: a model other than the default one has its own arguments."""

    @model_validator(mode="before")
    @classmethod
    def _own_arguments(cls, data: Any) -> Any:
        if isinstance(data, dict) and "model_args" not in data:
            default = cls.model_fields["model"].default
            return {**data, "model_args": ""} if data.get("model", default) != default else data
        return data
