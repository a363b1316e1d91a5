"""YAML as data: keys are text and stand once in a section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


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
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def read_yaml_file(path: Path) -> Any:
    """The data in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such YAML; one line that says what is wrong, and where.
    """
    return read_yaml(path.read_text(encoding="utf-8"))


class _DataLoader(yaml.SafeLoader):
    def get_single_node(self) -> Any:
        """The root of the document. Its keys are checked, and that no section contains an alias of itself."""
        root = super().get_single_node()
        _check(root, set(), ())
        return root


def _check(node: Any, known: set[int], above: tuple[int, ...]) -> None:
    if id(node) in above:
        raise yaml.MarkedYAMLError(problem="a section contains an alias of itself", problem_mark=node.start_mark)
    if id(node) in known or not isinstance(node, yaml.CollectionNode):
        return
    known.add(id(node))
    seen: set[str] = set()
    for entry in node.value:
        inner = [entry]
        if isinstance(node, yaml.MappingNode):
            key, value = entry
            _check_key(key, seen)
            inner = [value]
        for one in inner:
            _check(one, known, (*above, id(node)))


def _check_key(key: Any, seen: set[str]) -> None:
    """Refuse a key that is no text, or is there already; ``<<`` merges other sections."""
    tags = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
    if key.tag not in tags or not isinstance(key.value, str):
        text = key.value[:40] if isinstance(key.value, str) else "that is a list or a section"
        raise yaml.MarkedYAMLError(problem=f"key {text} must be text; put it in quotes", problem_mark=key.start_mark)
    if key.value in seen:
        raise yaml.MarkedYAMLError(problem=f"key {key.value!r} stands twice", problem_mark=key.start_mark)
    seen.add(key.value)
