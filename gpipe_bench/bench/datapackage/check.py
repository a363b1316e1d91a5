"""Whether a folder of results is what its descriptor says: hashes, sizes, types, constraints, keys.

Frictionless (https://framework.frictionlessdata.io) does the checking, as anybody who cites the data would. What no
descriptor can say is checked here: that the digest of a configuration is its digest, and that a row says where its
values come from.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from gpipe_bench.bench.datapackage.descriptor import DESCRIPTOR, describe_folder
from gpipe_bench.bench.datapackage.kinds import KINDS
from gpipe_bench.configurations import CONFIGURATION_COLUMNS, CONFIGURATIONS, digest
from gpipe_bench.errors import ConfigError

__all__ = ["check_folder"]

_AT_MOST: Final = 20
_ORIGIN: Final = {
    "published": ("source",),
    "simulated": ("commit", "config_sha256", "profile"),
    "measured": ("commit", "config_sha256", "torch", "python"),
}
"""What a row with values must say of where they come from, by its evidence."""
_WRITE: Final = "write it: python -m gpipe_bench datapackage write"


def check_folder(folder: Path) -> list[str]:
    """Every problem of the data package in ``folder``; empty when there is none.

    Raises:
        ConfigError: there is no descriptor, or Frictionless is not installed.
    """
    path = folder / DESCRIPTOR
    try:
        written: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError([f"data package must have a descriptor, got {path} ({error}); {_WRITE}"]) from error
    problems = [*_invalid(path), *_false_digests(folder), *_without_origin(folder)]
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


def _false_digests(folder: Path) -> Iterator[str]:
    """Configurations that are not what their digest says."""
    for path in sorted(folder.rglob(f"*_{CONFIGURATIONS}.csv")):
        _, lines = _read(path)
        for number, line in enumerate(lines, start=2):
            key, text = (line.get(name) or "" for name in CONFIGURATION_COLUMNS)
            if digest(text) != key:
                place = f"{path.relative_to(folder).as_posix()}, line {number}"
                yield f"{place}: config_sha256 must be the digest of the configuration, got {key!r}; take it again"


def _without_origin(folder: Path) -> Iterator[str]:
    """Columns of provenance that rows with values leave empty; companions lead to rows that have them."""
    headers = [kind.columns for kind in KINDS if kind.records]
    for path in sorted(folder.rglob("*.csv")):
        header, lines = _read(path)
        if header not in headers:
            continue
        blank: dict[tuple[str, str], list[int]] = {}
        for number, line in enumerate(lines, start=2):
            evidence = line.get("evidence") or ""
            for name in _ORIGIN.get(evidence, ()) if line.get("status") == "ok" else ():
                if not line.get(name):
                    blank.setdefault((evidence, name), []).append(number)
        for (evidence, name), numbers in blank.items():
            place = f"{path.relative_to(folder).as_posix()}, line {numbers[0]}"
            more = f" and in {len(numbers) - 1} more" if len(numbers) > 1 else ""
            yield f"{place}{more}: {name} must be given in a {evidence} row that is ok, got none; take it again"


def _read(path: Path) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """Header and lines of a table; nothing of one that cannot be read, of which Frictionless says so."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            return tuple(reader.fieldnames or ()), list(reader)
    except (UnicodeDecodeError, csv.Error):
        return (), []


def _outdated(written: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Where the descriptor is not what the files give now."""
    if written == expected:
        return []
    resources = written.get("resources")
    old = {one.get("path"): one for one in (resources if isinstance(resources, list) else []) if isinstance(one, dict)}
    new = {resource["path"]: resource for resource in expected["resources"]}
    differing = [str(path) for path in {**old, **new} if old.get(path) != new.get(path)]
    what = ", ".join(differing) or "its head"
    return [f"descriptor must be that of the files, got another for {what}; {_WRITE}"]
