"""YAML as data and nothing else.

Keys are text and stand once in a section; values are text, numbers, true, false, null, lists and sections.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

_TAG: Final = "tag:yaml.org,2002:"
_SCALARS: Final = tuple(_TAG + name for name in ("str", "int", "float", "bool", "null"))
_PLAIN: Final = (*_SCALARS, f"{_TAG}seq", f"{_TAG}map")


def read_yaml(text: str) -> Any:
    """The data in ``text``.

    Raises:
        ValueError: it is no such YAML; one line that says what is wrong, and where.
    """
    try:
        return yaml.load(text, Loader=_DataLoader)  # noqa: S506 - a SafeLoader that takes less
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise ValueError(" ".join(f"{where}{what}".split())) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def read_yaml_file(path: Path) -> Any:
    """The data in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such YAML; one line that says what is wrong, and where.
    """
    return read_yaml(path.read_text(encoding="utf-8"))


class _DataLoader(yaml.SafeLoader):
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
