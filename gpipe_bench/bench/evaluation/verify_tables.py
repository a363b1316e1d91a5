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


def checks_of_predictions(path: Path, references: Iterable[Path] = ()) -> list[Check]:
    """Every published cell and its simulated value, then each simulated value beside that of reference predictions.

    Raises:
        ConfigError: a table cannot be read, or holds words where numbers belong; all problems.
    """
    own = _predictions(path)
    return [*own, *_held_to([old for place in references for old in _predictions(place)], own)]


def _predictions(path: Path) -> list[Check]:
    found = []
    table = read_table(path, _PREDICTIONS, kind="predictions", key=_PLACE)
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


def checks_of_claims(path: Path, references: Iterable[Path] = (), tolerances: Sequence[Tolerance] = ()) -> list[Check]:
    """What the verdicts of the transparency experiment are held to: zero, or a difference of accuracies or losses.

    Then what the table must hold and does not. Of a model that is in the table this is each claim of the reference to
    which a tolerance is put, and each quantity that a tolerance for cells of any name (``*``) puts a number to, once.

    Raises:
        ConfigError: a table cannot be read, has no lines, or claims without a number; all problems.
    """
    by_model = _claims(path)
    own = [check for checks in by_model.values() for check in checks]
    olds = [old for place in references for model, some in _claims(place).items() if model in by_model for old in some]
    missing = [check for check in _held_to([old for old in olds if _is_held(old, tolerances)], own) if check.verdict]
    quantities = [one for one in tolerances if one.against == "claim" and one.cell == "*" and one.metric.isidentifier()]
    for model, checks in by_model.items():
        known = {check.metric for check in (*checks, *(old for old in olds if old.cell.startswith(f"{model}-")))}
        wanted = [one for one in quantities if math.isfinite(one.tolerance) and one.metric not in known]
        missing += [lacking("claim", "transparency", model, one.metric, reason=one.reason) for one in wanted]
    return [*own, *missing]


def _held_to(reference: Iterable[Check], own: Iterable[Check]) -> Iterator[Check]:
    """The numbers of a reference, each with that of the same place, or ``MISSING`` where there is none."""
    here = {(check.table, check.cell, check.metric): check for check in own}
    for place, old in {(old.table, old.cell, old.metric): old for old in reference}.items():
        if check := here.get(place):
            status = "ok" if old.got is not None else "oom"
            held = replace(check, against="reference", expected=old.got, expected_status=status)
            yield replace(held, expected_commit=old.commit)
        else:
            known = {"evidence": old.evidence, "profile": old.profile, "expected_commit": old.commit}
            yield lacking("reference", *place, **known)


def _claims(path: Path) -> dict[str, list[Check]]:
    table = read_table(path, _CLAIMS, kind="transparency-verdict", key=_CLAIM)
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


def _is_held(check: Check, tolerances: Iterable[Tolerance]) -> bool:
    """Whether a number is required of it."""
    return next((math.isfinite(one.tolerance) for one in tolerances if one.fits(check)), False)
