"""Whether a folder of results is what its descriptor says: hashes, sizes, types, constraints, keys.

Frictionless (https://framework.frictionlessdata.io) does the checking, as anybody who cites the data would. What no
descriptor can say is checked here: that the digest of a configuration is its digest, and that a row says where its
values come from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.results.configurations import CONFIGURATION_COLUMNS, CONFIGURATIONS, digest
from gpipe_bench.results.schema import OF_RUNS, TABLES, table_of
from gpipe_bench.results.tables import companion_path, header_of, read_table, read_text
from gpipe_bench.suite.datapackage.descriptor import DESCRIPTOR, describe_folder

if TYPE_CHECKING:
    import pandas as pd

_AT_MOST: Final = 20
_SENT: Final = ("rows", "peers")
"""Kinds of tables whose rows have a step time."""

_SAME: Final = 0.01
"""Part of the batch that throughput times step time may differ by, for numbers that were rounded."""

_STEPS: Final = {"rows": ("cell", "repeat"), "peers": ("case", "contender")}
"""Columns by which timed steps lead to their row, by the kind of its table."""

_EQUAL: Final = 1e-6
"""Part of a value that may differ from that of the steps, which are written with all their digits."""

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


def check_taken(path: Path) -> list[str]:
    """What ``check_sent`` finds in the measured rows of a table, which may have others beside them.

    Raises:
        ConfigError: as for ``check_sent``.
    """
    table = read_text(path)
    if table_of(list(table.columns), path).name not in _SENT or not (table["evidence"] == "measured").any():
        return []
    return check_sent(path, mixed=True)


def check_sent(path: Path, *, mixed: bool = False) -> list[str]:
    """Every problem of a table of measured rows that somebody sends, with its configurations beside it.

    Beside types and limits of columns: each row that is ok says where it is from, was measured at a commit without
    further changes, leads to its configuration, and its throughput is that of its batch and step time. Where the timed
    steps lie beside the table, each such row has the step time and throughput that its steps give.

    Args:
        path: the table.
        mixed: pass over rows that were not measured, which are a problem otherwise.

    Raises:
        ConfigError: the table, its configurations or its steps cannot be read, or values are not what their columns may
            hold.
    """
    table = read_text(path)
    kind = table_of(list(table.columns), path)
    if kind.name not in _SENT:
        raise ConfigError([f"table must be one of rows, got {kind.name} in {path}; name <experiment>.csv itself"])
    typed = read_table(path, kind.columns, kind=kind.name, key=kind.key)
    beside = companion_path(path, CONFIGURATIONS)
    known = read_text(beside)
    if tuple(known.columns) != CONFIGURATION_COLUMNS:
        raise ConfigError([f"configurations must have columns {CONFIGURATION_COLUMNS}, got others in {beside}"])
    if mixed:
        measured = typed["evidence"] == "measured"
        table, typed = table[measured], typed[measured]
    problems = [*_false_digests_of(known, beside.name), *_without_origin_of(table, path.name)]
    ok = typed["status"] == "ok"
    speed, step, batch = (typed[name] for name in ("throughput_samples_per_s", "step_time_ms", "batch_size"))
    rules = {
        "evidence must be measured": typed["evidence"] != "measured",
        "dirty must be False": ok & ~(typed["dirty"] == False).fillna(False),  # noqa: E712 - values, not one truth
        "commit must be 40 hexadecimal digits": ok & ~table["commit"].str.fullmatch("[0-9a-f]{40}"),
        f"config_sha256 must be one of {beside.name}": ~table["config_sha256"].isin(known["config_sha256"]),
        "step_time_ms must be there": ok & step.isna(),
        "throughput_samples_per_s must be batch_size / step_time_ms": ok
        & ((speed * step / 1e3 - batch).abs() > _SAME * batch).fillna(False),
    }
    for rule, broken in rules.items():
        if len(lines := table.index[broken]):
            more = f" and in {len(lines) - 1} more" if len(lines) > 1 else ""
            value = table[rule.split()[0]][lines[0]]
            problems.append(f"{path.name}, line {lines[0] + 2}{more}: {rule}, got {value or 'none'}; measure it again")
    steps = companion_path(path, "steps")
    if steps.exists():
        problems += _unlike_steps(typed[ok & (typed["evidence"] == "measured")], kind.name, path.name, steps)
    return problems


def _unlike_steps(rows: pd.DataFrame, kind: str, place: str, path: Path) -> Iterator[str]:
    """Rows whose step time or throughput is not what their timed steps give.

    The step time is the median of the steps. In a race it is the median over the rounds of the median of each round.
    """
    own = list(_STEPS[kind])
    each = [*own, "round"] if kind == "peers" else own
    name = "peers-steps" if kind == "peers" else "steps"
    key = TABLES[name].key
    steps = read_table(path, (*key, "step_time_ms"), kind=name, key=key, given=("step_time_ms",), empty=True)
    medians = steps.groupby(each)["step_time_ms"].median().groupby(own).median()
    for line, row in rows.join(medians.rename("of_steps"), on=own).iterrows():
        step, speed, expected = row["step_time_ms"], row["throughput_samples_per_s"], row["of_steps"]
        run = " of ".join(f"{column} {row[column]}" for column in reversed(own))
        where = f"{place}, line {int(str(line)) + 2}, {run}"
        if math.isnan(expected):  # no step leads to this row
            yield f"{where}: step_time_ms must be that of its steps, got none in {path.name}; send all steps of the run"
            continue
        fitting = row["batch_size"] / expected * 1e3 if expected else float("inf")
        if abs(step - expected) > _EQUAL * expected or abs(speed - fitting) > _EQUAL * fitting:
            got, given = f"{step:.6g} ms", f"{expected:.6g} ms"
            if not math.isnan(speed):  # as those of tiny workloads of a race are
                got, given = f"{got} and {speed:.6g} samples/s", f"{given} and {fitting:.6g} samples/s"
            rule = "step_time_ms and throughput_samples_per_s must be those of its steps"
            yield f"{where}: {rule}, got {got}, but {path.name} gives {given}; measure it again"


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
        yield from _false_digests_of(table, path.relative_to(folder).as_posix())


def _false_digests_of(table: pd.DataFrame, place: str) -> Iterator[str]:
    wrong = table[table["configuration"].map(digest) != table["config_sha256"]]
    for line, key in wrong["config_sha256"].items():
        where = f"{place}, line {int(str(line)) + 2}"
        yield f"{where}: config_sha256 must be the digest of the configuration, got {key!r}; take it again"


def _without_origin(folder: Path) -> Iterator[str]:
    """Columns of provenance that rows with values leave empty; companions lead to rows that have them."""
    for path, table in _tables(folder, "*.csv", [TABLES[name].columns for name in OF_RUNS]):
        yield from _without_origin_of(table, path.relative_to(folder).as_posix())


def _without_origin_of(table: pd.DataFrame, place: str) -> Iterator[str]:
    for evidence, members in table[table["status"] == "ok"].groupby("evidence", sort=False):
        for name in _ORIGIN.get(str(evidence), ()):
            own = members
            if name in _OF_THIS_PROGRAM and "source" in members:
                own = members[members["source"] == ""]
            if len(blank := own.index[own[name] == ""]):
                more = f" and in {len(blank) - 1} more" if len(blank) > 1 else ""
                where = f"{place}, line {blank[0] + 2}{more}"
                yield f"{where}: {name} must be given in a {evidence} row that is ok, got none; take it again"


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
