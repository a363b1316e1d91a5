"""The tables that ``verify`` reads: tolerances, predictions and promises, and which of their lines are not there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.bench.evaluation.verify import Check, Tolerance, lacking, origin_of
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.configurations import CONFIGURATION_COLUMNS, CONFIGURATIONS, digest
from gpipe_bench.results.tables import companion_path, plain_records, read_table
from gpipe_bench.results.transparency_rows import GROUP

if TYPE_CHECKING:
    import pandas as pd

_TOLERANCES: Final = ("against", "table", "cell", "metric", "tolerance", "reason")
_PREDICTIONS: Final = ("table", "experiment", "metric", "published", "simulated")
_CLAIM: Final = ("model", *(name for name in GROUP if name != "model"), "quantity", "reference")
_CLAIMS: Final = (
    *("model", "precision", "normalisation", "arm", "checkpoint", "deferred_batch_norm"),
    *("quantity", "estimate", "low", "high"),
)

_ENDS: Final = ["estimate", "low", "high"]
_PLACE: Final = ("table", "experiment", "metric")


def read_tolerances(path: Path) -> list[Tolerance]:
    """The tolerances in a CSV file with the columns of :class:`Tolerance`; an empty tolerance requires nothing.

    Raises:
        ConfigError: it cannot be read, or lines are wrong; all problems.
    """
    table = read_table(path, _TOLERANCES, kind="tolerances", given=_TOLERANCES[:4], key=_TOLERANCES[:4])
    table["tolerance"] = table["tolerance"].fillna(math.inf)
    return [Tolerance(**line) for line in plain_records(table[[*_TOLERANCES]])]


def check_configurations(path: Path, table: pd.DataFrame) -> None:
    """Check that the configurations beside a table have those of its lines, where they are there.

    Raises:
        ConfigError: a line has a digest that leads to no configuration; all of them.
    """
    beside = companion_path(path, CONFIGURATIONS)
    if not beside.is_file() or "config_sha256" not in table:
        return
    known = read_table(beside, CONFIGURATION_COLUMNS, kind="configurations", key=CONFIGURATION_COLUMNS[:1])
    lines = table[(table["config_sha256"] != "") & ~table["config_sha256"].isin(known["configuration"].map(digest))]
    rule = f"must have a digest of a configuration in {beside.name}"
    if len(lines):
        raise ConfigError([f"{path}, line {int(str(line)) + 2} {rule}, got {text!r}; make the table again"
                           for line, text in lines["config_sha256"].items()])  # fmt: skip


def checks_of_predictions(path: Path) -> list[Check]:
    """Every published cell and its simulated value, from the table that the predictions wrote.

    Raises:
        ConfigError: it cannot be read, or holds words where numbers belong; all problems.
    """
    found = []
    table = read_table(path, _PREDICTIONS, key=_PLACE)
    check_configurations(path, table)
    for line in plain_records(table):
        expected, got = line["published"], line["simulated"]
        # Print leaves a cell empty that ran out of memory; a prediction is empty for that reason where print is.
        printed = "oom" if expected is None else "ok"
        status = "oom" if got is None and expected is None else "ok"
        place = line["table"], line["experiment"], line["metric"]
        check = Check("published", *place, expected, got, expected_status=printed, status=status)
        found.append(replace(check, **origin_of(line)))
    return found


def changed_predictions(checks: Iterable[Check], references: Iterable[Path]) -> Iterator[Check]:
    """The simulated values of ``checks`` held to those of the reference predictions.

    Raises:
        ConfigError: as :func:`checks_of_predictions`.
    """
    olds = {(old.table, old.cell, old.metric): old for path in references for old in checks_of_predictions(path)}
    for check in checks:
        if old := olds.get((check.table, check.cell, check.metric)):
            status = "ok" if old.got is not None else "oom"
            held = replace(check, against="reference", expected=old.got, expected_status=status)
            yield replace(held, expected_commit=old.commit)


def checks_of_claims(path: Path) -> list[Check]:
    """What the verdicts of the transparency experiment are held to: zero, or a difference of accuracies or losses.

    Raises:
        ConfigError: it cannot be read, has no lines, or claims without a number; all problems.
    """
    return [check for checks in _claims(path).values() for check in checks]


def missing_predictions(checks: Iterable[Check], references: Iterable[Path]) -> Iterator[Check]:
    """The lines of reference predictions that are not among ``checks``.

    Raises:
        ConfigError: as :func:`checks_of_predictions`.
    """
    olds = [check for path in references for check in checks_of_predictions(path)]
    return _missing(checks, olds)


def missing_claims(path: Path, references: Iterable[Path], tolerances: Sequence[Tolerance]) -> Iterator[Check]:
    """What a table of claims must hold and does not.

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
    )
    quantities = [one for one in tolerances if one.against == "claim" and one.cell == "*" and one.metric.isidentifier()]
    for model, checks in own.items():
        known = {check.metric for check in (*checks, *(old for old in olds if old.cell.startswith(f"{model}-")))}
        for one in quantities:
            if math.isfinite(one.tolerance) and one.metric not in known:
                yield lacking("claim", "transparency", model, one.metric, reason=one.reason)


def _claims(path: Path) -> dict[str, list[Check]]:
    """The checks of a table of claims, by model."""
    table = read_table(path, _CLAIMS, key=_CLAIM)
    table["largest"] = table[_ENDS].abs().max(axis=1)
    if len(blank := table[table["largest"].isna()]):
        rule = f"must hold a number in one of {', '.join(_ENDS)}"
        quantities = blank["quantity"].items()
        raise ConfigError([f"{path}, line {int(str(k)) + 2} {rule}, got none for {name}; make the table again"
                           for k, name in quantities])  # fmt: skip
    deferred = table["deferred_batch_norm"].fillna(False).map({True: "-deferred", False: "-plain"})
    way = table["arm"].where(table["arm"] != "pipeline", table["checkpoint"] + deferred)
    table["name"] = table["model"] + "-" + table["precision"] + "-" + table["normalisation"] + "-" + way
    return {
        str(model): [_claim(line) for line in plain_records(own)] for model, own in table.groupby("model", sort=False)
    }


def _claim(line: dict[str, Any]) -> Check:
    place = "transparency", line["name"], line["quantity"]
    return Check("claim", *place, 0.0, line["largest"], **origin_of(line))


def _missing(checks: Iterable[Check], reference: Iterable[Check]) -> Iterator[Check]:
    here = {(check.table, check.cell, check.metric) for check in checks}
    for key, old in {(old.table, old.cell, old.metric): old for old in reference}.items():
        if key not in here:
            known = {"evidence": old.evidence, "profile": old.profile, "expected_commit": old.commit}
            yield lacking("reference", *key, **known)


def _is_held(check: Check, tolerances: Iterable[Tolerance]) -> bool:
    """Whether a number is required of it."""
    return next((math.isfinite(one.tolerance) for one in tolerances if one.fits(check)), False)
