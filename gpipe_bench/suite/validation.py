"""Settings from plain data, with every problem reported at once.

pydantic stops before rules between settings as long as one setting is wrong. Here wrong settings are reported and
replaced by their defaults, and the rules between the remaining ones are checked all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from reprlib import Repr
from typing import Any, Final, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gpipe_bench.errors import ConfigError
from gpipe_bench.suite.settings import Section
from gpipe_bench.util.nearest import nearest

Path = tuple[str, ...]
SectionT = TypeVar("SectionT", bound=Section)


_PLAIN: Final = {
    "greater_than_equal": "must be at least {ge}, got {got}; raise it",
    "greater_than": "must be more than {gt}, got {got}; raise it",
    "less_than_equal": "must be at most {le}, got {got}; lower it",
    "less_than": "must be less than {lt}, got {got}; lower it",
    "tuple_type": "must be a list, got {got}; write it in brackets",
    "finite_number": "must be a finite number, got {got}; write one",
    "too_long": "must have at most {max_length} entries, got {actual_length}; leave some out",
    "too_short": "must have at least {min_length} entry, got {got}; add one",
    "dict_type": "must be sections with names of your own, got {got}; write them below it, indented",
    "float_type": "must be a number, got {got}; write it without quotes",
    "float_parsing": "must be a number, got {got}; write it without quotes",
    "int_type": "must be a whole number, got {got}; write it without quotes or decimals",
    "bool_type": "must be true or false, got {got}; write one of them without quotes",
    "string_type": "must be text, got {got}; put it in quotes",
    "model_type": "must be a section of settings, got {got}; write its keys below it, indented",
}
"""What is wrong, by pydantic's kind of error."""

_LONGEST: Final = 600
_VALUES: Final = Repr()
_VALUES.maxstring = _VALUES.maxother = _VALUES.maxlong = 100
_VALUES.maxlist = _VALUES.maxtuple = _VALUES.maxdict = 12
"""Shows values in messages: all of the usual ones, the ends of long ones."""


def validated(kind: type[SectionT], data: Mapping[str, Any], name: Callable[[Path], str]) -> SectionT:
    """The settings in ``data``.

    Args:
        kind: the section to make; every setting without a default must be in ``data``.
        data: plain values, as from YAML or a command line.
        name: how to call the setting at a path in a message.

    Raises:
        ConfigError: one or more settings are wrong; carries all problems.
    """
    left = _copied(data)
    wrong: dict[Path, list[str]] = {}
    while True:
        try:
            made = kind.model_validate(left)
            break
        except ValidationError as error:
            for item in filter(_own_mistake, error.errors()):
                path = _field_path(item["loc"])
                if item["type"] == "missing" and path in wrong:
                    continue
                said = wrong.setdefault(path, [])
                # A list may have several wrong entries.
                rules = [f"{name(path)} {rule}" for rule in _rule(kind, path, item).splitlines()]
                said += [line for line in rules if line not in said]
                _remove(left, path)
            if any(item["type"] == "missing" for item in error.errors()):
                lines = [line for said in wrong.values() for line in said]
                raise ConfigError(list(map(_shortened, lines))) from error
    lines = [line for said in wrong.values() for line in said]
    for section_path, section in _sections(made):
        for problem in section.problems():
            paths = [(*section_path, field) for field in problem.fields]
            if not any(path[: len(bad)] == bad for bad in wrong for path in paths):
                lines.append(problem.message(name(paths[0])))
    if lines:
        raise ConfigError(list(map(_shortened, lines)))
    return made


def _copied(data: Mapping[Any, Any]) -> dict[str, Any]:
    """A copy of the data, whose keys are text."""
    return {str(key): _copied(value) if isinstance(value, Mapping) else deepcopy(value) for key, value in data.items()}


def _shortened(line: str) -> str:
    """A message whose values may be of any length; what to change stands at its end."""
    half = _LONGEST // 2
    return line if len(line) <= _LONGEST else f"{line[:half]} ... {line[-half:]}"


def _own_mistake(item: ErrorDetails) -> bool:
    """Whether an error is not only that of a list whose entries are wrong, which counts as too short without them."""
    return item["type"] != "too_short" or len(item["input"]) < item["ctx"]["min_length"]


def _field_path(loc: Sequence[int | str]) -> Path:
    """The path down to the setting itself; positions inside a list belong to the list."""
    path: list[str] = []
    for part in loc:
        if isinstance(part, int):
            break
        path.append(part)
    return tuple(path)


def _remove(data: dict[str, Any], path: Path) -> None:
    for part in path[:-1]:
        data = data[part]
    if path:
        data.pop(path[-1], None)
    else:
        data.clear()


def _sections(section: Section, path: Path = ()) -> Iterator[tuple[Path, Section]]:
    yield path, section
    for field in type(section).model_fields:
        value = getattr(section, field)
        named = value.items() if isinstance(value, dict) else [(None, value)]
        for name, inner in named:
            if isinstance(inner, Section):
                yield from _sections(inner, (*path, field) if name is None else (*path, field, name))


def _rule(kind: type[BaseModel], path: Path, item: ErrorDetails) -> str:
    got, context = _VALUES.repr(item["input"]), item.get("ctx", {})
    match item["type"]:
        case "extra_forbidden":
            return f"must be a known key, got {path[-1]!r}; {nearest(path[-1], _keys(kind, path[:-1]))}"
        case "missing":
            return "must be given, got nothing; add it"
        case "value_error":
            return str(context["error"])
        case "literal_error":
            choices = [choice.strip(" '") for choice in context["expected"].replace(" or ", ", ").split(",")]
            return f"must be one of {', '.join(choices)}, got {got}; {nearest(str(item['input']), choices)}"
        case plain if plain in _PLAIN:
            return _PLAIN[plain].format(got=got, **context)
        case _:
            return f"must be valid ({item['msg']}), got {got}; change it"


def _keys(kind: type[BaseModel], path: Path) -> list[str]:
    """The settings of the section at ``path``; a section of sections has names of the user's choice in between."""
    inner: Any = kind
    for part in path:
        if get_origin(inner) is dict:
            inner = get_args(inner)[1]
        elif isinstance(inner, type) and issubclass(inner, BaseModel):
            inner = inner.model_fields[part].annotation
    return list(inner.model_fields) if isinstance(inner, type) and issubclass(inner, BaseModel) else []
