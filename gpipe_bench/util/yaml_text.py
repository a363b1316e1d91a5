"""YAML as data and nothing else: text that asks for more memory, time or nesting than it has a use for is refused.

Keys are text and stand once in a section; values are text, numbers, true, false, null, lists and sections. An alias
counts as much as what it stands for, so that a few hundred bytes cannot become gigabytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

_MOST_CHARACTERS: Final = 1_000_000
_MOST_VALUES: Final = 20_000
_DEEPEST: Final = 20
_TAG: Final = "tag:yaml.org,2002:"
_SCALARS: Final = tuple(_TAG + name for name in ("str", "int", "float", "bool", "null"))
_PLAIN: Final = (*_SCALARS, f"{_TAG}seq", f"{_TAG}map")


def read_yaml(text: str) -> Any:
    """The data in ``text``.

    Raises:
        ValueError: it is no such YAML; one line that says what is wrong, and where.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has more than {_MOST_CHARACTERS} characters")
    try:
        return yaml.load(text, Loader=_DataLoader)  # noqa: S506 - a SafeLoader that takes less
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise ValueError(" ".join(f"{where}{what}".split())) from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def read_yaml_file(path: Path) -> Any:
    """The data in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such YAML; one line that says what is wrong, and where.
    """
    with path.open(encoding="utf-8") as file:
        return read_yaml(file.read(_MOST_CHARACTERS + 1))


class _DataLoader(yaml.SafeLoader):
    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._values = 0
        self._depth = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node, counted with all below it."""
        mark: yaml.Mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        is_alias, before = self.check_event(yaml.AliasEvent), self._values
        self._depth += 1
        if self._depth > _DEEPEST:
            _refuse(f"values are nested more than {_DEEPEST} deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            _refuse("an alias stands inside the value that it refers to", mark)
        self._values += self._sizes[id(node)] if is_alias else 1
        if self._values > _MOST_VALUES:
            _refuse(f"there are more than {_MOST_VALUES} values, aliases included", mark)
        self._sizes.setdefault(id(node), self._values - before)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node."""
        if node.tag not in _PLAIN:
            got = f"{node.tag.removeprefix(_TAG)} {_shown(node)}"
            _refuse(f"a value must be text, a number, true, false, a list or a section, got {got}", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, OverflowError):
            # A tag that does not fit the text behind it, or a number of thousands of digits.
            kind = node.tag.removeprefix(_TAG)
            _refuse(f"a value must be {kind} as it says, got {_shown(node)}", node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The section of a node; keys are told apart before a dictionary would merge them."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != f"{_TAG}str" or not isinstance(key, yaml.ScalarNode):
                _refuse(f"key {_shown(key)} must be text; put it in quotes", key.start_mark)
            if key.value in seen:
                _refuse(f"key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _shown(node: yaml.Node) -> str:
    """The text of a node, not all of a long one."""
    if not isinstance(node, yaml.ScalarNode):
        return "that is a list or a section"
    text: str = node.value
    return text if len(text) <= 40 else f"{text[:40]}... of {len(text)} characters"


def _refuse(what: str, mark: yaml.Mark) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=what, problem_mark=mark)
