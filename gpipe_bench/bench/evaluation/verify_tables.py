"""The tables that ``verify`` reads: tolerances, predictions and promises, and which of their lines are not there."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gpipe_bench.bench.evaluation.verify import AGAINST, Check, Tolerance, lacking, origin_of
from gpipe_bench.errors import ConfigError

__all__ = ["checks_of_claims", "checks_of_predictions", "missing_claims", "missing_predictions", "read_tolerances"]

_TOLERANCES: Final = ("against", "table", "cell", "metric", "tolerance", "reason")
_PREDICTIONS: Final = ("table", "experiment", "metric", "published", "simulated")
_CLAIMS: Final = (
    *("model", "precision", "normalisation", "arm", "checkpoint", "deferred_batch_norm"),
    *("quantity", "estimate", "low", "high"),
)

_Line = tuple[dict[str, str], dict[str, float | None]]
"""A line and the numbers in some of its columns, None where one is empty."""


def read_tolerances(path: Path) -> list[Tolerance]:
    """The tolerances in a CSV file with the columns of :class:`Tolerance`; an empty tolerance requires nothing.

    Raises:
        ConfigError: it cannot be read, or lines are wrong; all problems.
    """
    lines = _read(path, _TOLERANCES)
    found, problems = [], []
    for number, line in enumerate(lines, start=2):
        limit = _limit(line["tolerance"])
        if limit is None or line["against"] not in AGAINST:
            rule = f"must hold a tolerance of at least 0 and one of {', '.join(AGAINST)}"
            got = f"{line['tolerance']!r} and {line['against']!r}"
            problems.append(f"{path}, line {number} {rule}, got {got}; correct it")
            continue
        place = {name: line[name] for name in ("against", "table", "cell", "metric")}
        found.append(Tolerance(**place, tolerance=limit, reason=line["reason"]))
    if problems:
        raise ConfigError(problems)
    return found


def checks_of_predictions(path: Path) -> list[Check]:
    """Every published cell and its simulated value, from the table that the predictions wrote.

    Raises:
        ConfigError: it cannot be read, or holds words where numbers belong; all problems.
    """
    found = []
    for line, numbers in _numbered(path, _PREDICTIONS, ("published", "simulated")):
        expected, got = numbers["published"], numbers["simulated"]
        # Print leaves a cell empty that ran out of memory; a prediction is empty for that reason where print is.
        printed = "oom" if expected is None else "ok"
        status = "oom" if got is None and expected is None else "ok"
        place = line["table"], line["experiment"], line["metric"]
        check = Check("published", *place, expected, got, expected_status=printed, status=status)
        found.append(replace(check, **origin_of(line)))
    return found


def checks_of_claims(path: Path) -> list[Check]:
    """What the verdicts of the transparency experiment are held to: zero, or a difference of accuracies or losses.

    Raises:
        ConfigError: it cannot be read, has no lines, or claims without a number; all problems.
    """
    return [check for checks in _claims(path).values() for check in checks]


def missing_predictions(
    checks: Iterable[Check], references: Iterable[Path], *, allowed: bool = False
) -> Iterator[Check]:
    """The lines of reference predictions that are not among ``checks``, as ``MISSING``, or where allowed ``left out``.

    Raises:
        ConfigError: as :func:`checks_of_predictions`.
    """
    olds = [check for path in references for check in checks_of_predictions(path)]
    return _missing(checks, olds, allowed=allowed)


def missing_claims(
    path: Path, references: Iterable[Path], tolerances: Sequence[Tolerance], *, allowed: bool = False
) -> Iterator[Check]:
    """What a table of claims must hold and does not, as ``MISSING``, or where allowed ``left out``.

    Of a model that is in the table this is each claim of the reference to which a tolerance is put, and each quantity
    that a tolerance for cells of any name (``*``) puts a number to, once.

    Raises:
        ConfigError: as :func:`checks_of_claims`.
    """
    own = _claims(path)
    olds = [check for place in references for model, some in _claims(place).items() if model in own for check in some]
    yield from _missing(
        [check for checks in own.values() for check in checks],
        [check for check in olds if _is_held(check, tolerances)],
        allowed=allowed,
    )
    quantities = [one for one in tolerances if one.against == "claim" and one.cell == "*" and one.metric.isidentifier()]
    for model, checks in own.items():
        known = {check.metric for check in (*checks, *(old for old in olds if old.cell.startswith(f"{model}-")))}
        for one in quantities:
            if math.isfinite(one.tolerance) and one.metric not in known:
                gap = lacking("claim", "transparency", model, one.metric, allowed=allowed)
                yield replace(gap, reason=one.reason)


def _claims(path: Path) -> dict[str, list[Check]]:
    """The checks of a table of claims, by model."""
    found: dict[str, list[Check]] = {}
    problems = []
    ends = ("estimate", "low", "high")
    for number, (line, numbers) in enumerate(_numbered(path, _CLAIMS, ends), start=2):
        sizes = [abs(value) for value in numbers.values() if value is not None]
        if not sizes:
            rule = f"must hold a number in one of {', '.join(ends)}"
            problems.append(f"{path}, line {number} {rule}, got none for {line['quantity']}; make the table again")
            continue
        deferred = "deferred" if line["deferred_batch_norm"] == "True" else "plain"
        way = f"{line['checkpoint']}-{deferred}" if line["arm"] == "pipeline" else line["arm"]
        cell = f"{line['model']}-{line['precision']}-{line['normalisation']}-{way}"
        # The largest of numbers among which one is none would hide it.
        largest = math.nan if any(map(math.isnan, sizes)) else max(sizes)
        check = Check("claim", "transparency", cell, line["quantity"], 0.0, largest)
        found.setdefault(line["model"], []).append(replace(check, **origin_of(line)))
    if not found and not problems:
        problems.append(f"table of claims must have lines, got none in {path}; make the table again")
    if problems:
        raise ConfigError(problems)
    return found


def _missing(checks: Iterable[Check], reference: Iterable[Check], *, allowed: bool) -> Iterator[Check]:
    here = {(check.table, check.cell, check.metric) for check in checks}
    for key, old in {(old.table, old.cell, old.metric): old for old in reference}.items():
        if key not in here:
            yield lacking("reference", *key, allowed=allowed, old=old)


def _is_held(check: Check, tolerances: Iterable[Tolerance]) -> bool:
    """Whether a number is required of it."""
    return next((math.isfinite(one.tolerance) for one in tolerances if one.fits(check)), False)


def _numbered(path: Path, needed: Sequence[str], columns: Sequence[str]) -> list[_Line]:
    """The lines of a table and the numbers in ``columns``."""
    found, problems = [], []
    for number, line in enumerate(_read(path, needed), start=2):
        numbers: dict[str, float | None] = {}
        for name in columns:
            try:
                numbers[name] = float(line[name]) if line[name] else None
            except ValueError:
                rule = f"must hold a number in {name}"
                problems.append(f"{path}, line {number} {rule}, got {line[name]!r}; make the table again")
        found.append((line, numbers))
    if problems:
        raise ConfigError(problems)
    return found


def _limit(text: str) -> float | None:
    """A tolerance; infinite for none, None for what is no tolerance."""
    try:
        limit = float(text or "inf")
    except ValueError:
        return None
    return limit if limit >= 0 else None


def _read(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="")
            lines = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError([f"table must be a readable CSV file, got {path} ({error}); make it first"]) from error
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            [f"columns of {path} must include {name!r}, got none; make the table again" for name in missing]
        )
    return lines
