"""Whether a folder of results is what its descriptor says: hashes, sizes, types, constraints, keys.

Frictionless (https://framework.frictionlessdata.io) does the checking, as anybody who cites the data would.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from gpipe_bench.bench.datapackage.descriptor import DESCRIPTOR, describe_folder
from gpipe_bench.errors import ConfigError

__all__ = ["check_folder"]

_AT_MOST: Final = 20
_WRITE: Final = "write it: python -m gpipe_bench datapackage write"


def check_folder(folder: Path) -> list[str]:
    """Every problem of the data package in ``folder``; empty when there is none.

    Raises:
        ConfigError: there is no descriptor, or Frictionless is not installed.
    """
    path = folder / DESCRIPTOR
    try:
        written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"data package must have a descriptor, got {path} ({error}); {_WRITE}"]) from error
    problems = _invalid(path)
    try:
        expected = describe_folder(folder)
    except ConfigError as error:
        return [*problems, *error.problems]
    return problems + _outdated(written, expected)


def _invalid(path: Path) -> list[str]:
    """What Frictionless finds."""
    try:
        from frictionless import validate
    except ImportError as error:
        raise ConfigError(
            [f"checking needs the package frictionless, got none ({error}); install it: pip install frictionless"]
        ) from error
    report: Any = validate(str(path))
    found: list[str] = [str(error.message) for error in report.errors]
    for task in report.tasks:
        found += [f"{task.place}: {error.message}" for error in task.errors]
    rest = len(found) - _AT_MOST
    return found[:_AT_MOST] + ([f"and {rest} more like these"] if rest > 0 else [])


def _outdated(written: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Where the descriptor is not what the files give now."""
    if written == expected:
        return []
    old = {resource.get("path"): resource for resource in written.get("resources", [])}
    new = {resource["path"]: resource for resource in expected["resources"]}
    differing = [str(path) for path in {**old, **new} if old.get(path) != new.get(path)]
    what = ", ".join(differing) or "its head"
    return [f"descriptor must be that of the files, got another for {what}; {_WRITE}"]
