"""Whether a folder of results is what its descriptor says: hashes, sizes, types, constraints, keys.

Frictionless (https://framework.frictionlessdata.io) does the checking, as anybody who cites the data would. What no
descriptor can say is checked here: that the digest of a configuration is its digest, and that a row says where its
values come from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.bench.datapackage.descriptor import DESCRIPTOR, describe_folder
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.configurations import CONFIGURATION_COLUMNS, CONFIGURATIONS, digest
from gpipe_bench.results.schema import OF_RUNS, TABLES
from gpipe_bench.results.tables import header_of, read_text

if TYPE_CHECKING:
    import pandas as pd

_AT_MOST: Final = 20
_ORIGIN: Final = {
    "published": ("source",),
    "simulated": ("commit", "config_sha256", "profile"),
    "emulated": ("commit", "config_sha256", "profile", "torch"),
    "measured": ("commit", "config_sha256", "torch", "python"),
}
"""What a row with values must say of where they come from, by its evidence."""
_OF_THIS_PROGRAM: Final = ("commit", "python")
"""What rows need not say if another program measured them, which their ``source`` names."""
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
    for path, table in _tables(folder, f"*_{CONFIGURATIONS}.csv", [CONFIGURATION_COLUMNS]):
        wrong = table[table["configuration"].map(digest) != table["config_sha256"]]
        for line, key in wrong["config_sha256"].items():
            place = f"{path.relative_to(folder).as_posix()}, line {int(str(line)) + 2}"
            yield f"{place}: config_sha256 must be the digest of the configuration, got {key!r}; take it again"


def _without_origin(folder: Path) -> Iterator[str]:
    """Columns of provenance that rows with values leave empty; companions lead to rows that have them."""
    for path, table in _tables(folder, "*.csv", [TABLES[name].columns for name in OF_RUNS]):
        for evidence, members in table[table["status"] == "ok"].groupby("evidence", sort=False):
            for name in _ORIGIN.get(str(evidence), ()):
                own = members
                if name in _OF_THIS_PROGRAM and "source" in members:
                    own = members[members["source"] == ""]
                if len(blank := own.index[own[name] == ""]):
                    place = f"{path.relative_to(folder).as_posix()}, line {blank[0] + 2}"
                    more = f" and in {len(blank) - 1} more" if len(blank) > 1 else ""
                    yield f"{place}{more}: {name} must be given in a {evidence} row that is ok, got none; take it again"


def _tables(folder: Path, pattern: str, headers: Sequence[tuple[str, ...]]) -> Iterator[tuple[Path, pd.DataFrame]]:
    """Tables with one of these headers; none that cannot be read, of which the descriptor says so."""
    for path in sorted(folder.rglob(pattern)):
        if tuple(header_of(path)) in headers:
            with suppress(ConfigError):
                yield path, read_text(path, listed=False)


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
