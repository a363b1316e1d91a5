"""Sections of settings, and the settings that only cells and configurations have; see :mod:`gpipe_bench.settings`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import BaseModel, ConfigDict, PlainSerializer, model_validator

from gpipe_bench.components import Components
from gpipe_bench.errors import ScheduleError
from gpipe_bench.models.own_files import portable
from gpipe_bench.results.configurations import canonical, digest
from gpipe_bench.schedules.table import (
    SCHEDULES,
    file_schedule,
    is_schedule_file,
)
from gpipe_bench.settings import Setting, any_text
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


def read_balance(value: Any) -> tuple[int, ...]:
    """Accept the form of tables and of the command line, ``34-76-70-61``, beside a list."""
    parts = str(value).split("-") if isinstance(value, str | int) and not isinstance(value, bool) else value
    sizes = [int(str(one)) if str(one).isdecimal() else 0 for one in parts] if isinstance(parts, list | tuple) else []
    if not sizes or min(sizes) < 1:
        raise ValueError(f"must be positive numbers of layers, got {value!r}; write them like 34-76-70-61")
    return tuple(sizes)


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


_BALANCES: Final = (
    {"type": "string", "pattern": r"^[1-9][0-9]*(-[1-9][0-9]*)*$"},
    {"type": "integer", "minimum": 1},
    {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
)
_BALANCE_HELP: Final = "layers per partition, joined by '-'"

Model = Annotated[
    str,
    Setting(
        "name in the table of models, or file.py:function",
        lambda name: portable(name) if isinstance(name, str) else name,
        {"type": "string"},
    ),
]
ModelArgs = Annotated[str, any_text("arguments of the model, 'key=value' joined by ';'")]
Balance = Annotated[
    tuple[int, ...],
    Setting(_BALANCE_HELP, read_balance, {"anyOf": [*_BALANCES]}),
    PlainSerializer(lambda sizes: "-".join(map(str, sizes)), return_type=str),
]
AutoBalance = Annotated[
    tuple[int, ...],
    Setting(
        f"{_BALANCE_HELP}; auto: the fastest slowest partition",
        lambda value: () if value in (AUTO, (), []) else read_balance(value),
        {"anyOf": [{"const": AUTO}, *_BALANCES]},
    ),
    PlainSerializer(lambda sizes: "-".join(map(str, sizes)) or AUTO, return_type=str),
]
OptionalSchedule = Annotated[
    str | None,
    Setting(
        "of docs/schedules.md, or a CSV file; null: autograd orders the backward pass",
        _schedule,
        {"anyOf": [{"enum": [*SCHEDULES]}, {"type": "string", "pattern": r"\.csv$"}, {"type": "null"}]},
    ),
]
Variant = Annotated[str, Setting("label of the components, such as dep-str-ptl", _variant, {"type": "string"})]


class ModelSection(Section):
    """A section with ``model`` and ``model_args``: a model other than the default one has its own arguments."""

    @model_validator(mode="before")
    @classmethod
    def _own_arguments(cls, data: Any) -> Any:
        if isinstance(data, dict) and "model_args" not in data:
            default = cls.model_fields["model"].default
            return {**data, "model_args": ""} if data.get("model", default) != default else data
        return data
