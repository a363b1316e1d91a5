"""Arguments of a model: declared once with type, default and rule; read from text such as ``depth=5;B=2``.

No PyTorch here: the workflow checks a configuration before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpipe_bench.errors import ConfigError
from gpipe_bench.util.nearest import nearest

Value = int | float | bool
Values = Mapping[str, Value]

_BOOLEANS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False, "on": True, "off": False}
_LONGEST = 100
_LARGEST = 1_000_000
"""Largest integer of an argument; a model of more layers would be built for hours."""
_RULES: dict[type[Value], str] = {bool: "true or false", int: "an integer", float: "a number"}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a model.

    Attributes:
        type: int, float or bool.
        default: what the published runs used.
        text: meaning and unit.
        minimum: smallest legal value, if there is one.
        multiple: the value must be a multiple of this.
        below: the value must be less than this, if set.
    """

    type: type[Value]
    default: Value
    text: str
    minimum: float | None = None
    multiple: int = 1
    below: float | None = None

    @property
    def rule(self) -> str:
        """What a value must be, as a phrase."""
        rule = _RULES[self.type] if self.multiple == 1 else f"a multiple of {self.multiple}"
        rule += "" if self.minimum is None else f", at least {self.minimum:g}"
        return rule if self.below is None else f"{rule} and less than {self.below:g}"

    def convert(self, value: object) -> Value | None:
        """The value in this argument's type, from text or data; None if it breaks the rule."""
        converted = _to_type(self.type, value)
        if converted is None or self.type is bool:
            return converted
        too_small = self.minimum is not None and not converted >= self.minimum
        too_big = (self.below is not None and not converted < self.below) or _is_too_large(converted)
        off_grid = self.type is int and converted % self.multiple != 0
        return None if too_small or too_big or off_grid else converted


def _is_too_large(value: Value) -> bool:
    return isinstance(value, int) and abs(value) > _LARGEST


def _to_type(kind: type[Value], value: object) -> Value | None:
    if isinstance(value, str):
        text = value.strip()
        if kind is bool:
            return _BOOLEANS.get(text.lower())
        try:
            return kind(text)
        except ValueError:
            return None
    # In Python a bool is an int: `depth=True` is a mistake, not depth 1.
    if isinstance(value, bool) or kind is bool:
        return value if kind is bool and isinstance(value, bool) else None
    if kind is float and isinstance(value, int | float):
        return float(value)
    return value if kind is int and isinstance(value, int) else None


def read_text(text: str) -> tuple[dict[str, str], list[str]]:
    """The pairs of ``key=value`` joined by ``;``, and what is wrong with the text: other forms, keys given twice."""
    pairs: dict[str, str] = {}
    problems: list[str] = []
    for part in filter(None, map(str.strip, text.split(";"))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            problems.append(f"model arguments must be 'key=value' joined by ';', got {part!r}; write '<key>=<value>'")
        elif key in pairs:
            problems.append(f"model argument {key!r} must be given once, got {pairs[key]} and {value}; drop one")
        else:
            pairs[key] = value
    return pairs, problems


def resolve(model: str, declared: Mapping[str, Argument], given: Mapping[str, object]) -> dict[str, Value]:
    """Every declared argument, in order, with the given value or its default.

    Raises:
        ConfigError: unknown names and values that break their rule; all of them.
    """
    problems = [
        f"argument of {model} must be one it declares, got {name!r}; {nearest(name, declared)}"
        for name in given
        if name not in declared
    ]
    values: dict[str, Value] = {}
    for name, argument in declared.items():
        value = argument.convert(given.get(name, argument.default))
        if value is None:
            text = repr(given[name])
            got = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
            is_too_large = _is_too_large(_to_type(argument.type, given[name]) or 0)
            rule = f"at most {_LARGEST}" if is_too_large and argument.below is None else argument.rule
            example = f"the default is {format_value(argument.default)}"
            problems.append(f"{name} of {model} must be {rule}, got {got}; {example}")
        else:
            values[name] = value
    if problems:
        raise ConfigError(problems)
    return values


def format_value(value: Value) -> str:
    """The text of a value; ``true`` and ``false`` for booleans."""
    return str(value).lower() if isinstance(value, bool) else str(value)
