"""Results held to print, to the reference and to what the pipeline promises, with tolerances that are data.

Each check compares one number with the one that is expected; the first tolerance whose patterns fit it decides. A check
that no tolerance fits is a problem of the tolerances, so that nothing goes unchecked in silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.results.configurations import CONFIGURATION_COLUMNS, CONFIGURATIONS, digest
from gpipe_bench.results.rows import SCHEMA_VERSION
from gpipe_bench.results.schema import TABLES
from gpipe_bench.results.tables import companion_path, plain_records, read_table
from gpipe_bench.results.transparency_rows import GROUP

if TYPE_CHECKING:
    import pandas as pd

_METRICS: Final = ("throughput_samples_per_s", "step_time_ms", "peak_allocated_gib", "peak_reserved_gib",
                   "utilization_fraction", "bubble_fraction", "copy_fraction", "recompute_fraction",
                   "imbalance_fraction", "microbatches", "device_count")  # fmt: skip
_AGREEING: Final = ("step_time_ms", "peak_allocated_gib", "peak_reserved_gib")
_CELL: Final = ("model", "model_args", "variant", "backward", "schedule", "transfer", "flavour", "partitions",
                "chunks", "checkpoint", "batch_size", "balance", "profile", "steps_overlap", "precision",
                "optimizer")  # fmt: skip
_OLD: Final = "_expected"


_TOLERANCES: Final = ("against", "table", "cell", "metric", "tolerance", "reason")
_PREDICTIONS: Final = ("table", "experiment", "metric", "published", "simulated")
_CLAIM: Final = ("model", *(name for name in GROUP if name != "model"), "quantity", "reference")
_CLAIMS: Final = (
    *("model", "precision", "normalisation", "arm", "checkpoint", "deferred_batch_norm"),
    *("quantity", "estimate", "low", "high"),
)

_ENDS: Final = ["estimate", "low", "high"]
_PLACE: Final = ("table", "experiment", "metric")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a number may be off; patterns are those of a shell.

    Attributes:
        against: what a number is held to: ``published``, print; ``reference``, a committed value of the same cell;
            ``simulated``, the simulator's value of an emulated cell; ``claim``, a promise of the engine.
        table: pattern of the table's name.
        cell: pattern of the cell's name.
        metric: pattern of the column.
        tolerance: largest relative difference, absolute for a claim; infinite where nothing is required.
        reason: why, where it is not the usual one.
    """

    against: str
    table: str
    cell: str
    metric: str
    tolerance: float
    reason: str = ""

    def fits(self, check: Check) -> bool:
        """Whether it decides a check."""
        pairs = ((self.table, check.table), (self.cell, check.cell), (self.metric, check.metric))
        return self.against == check.against and all(fnmatchcase(name, pattern) for pattern, name in pairs)


@dataclass(frozen=True, slots=True)
class Check:
    """One number and what it is held to.

    Attributes:
        against: as in :class:`Tolerance`.
        table: name of the table.
        cell: name of the cell.
        metric: the column; empty for a cell of a table of rows that is missing.
        expected: the number that it is held to; None where there is none, see ``expected_status``.
        got: the number; None where there is none, see ``status``.
        tolerance: the largest error that is allowed.
        verdict: ``ok``, ``OUTSIDE``, ``not required``; for a missing number ``MISSING`` or ``left out``.
        reason: of the tolerance.
        expected_status: why there is no number to be held to, such as ``oom``; ``ok`` where nothing is said.
        status: the same of the number itself.
        evidence: of the number, and so on: what its row says of the run that gave it.
        profile: its hardware.
        commit: its code.
        dirty: whether that had uncommitted changes.
        config_sha256: its configuration.
        expected_commit: the code that gave the number which it is held to; empty for print and promises.
    """

    against: str
    table: str
    cell: str
    metric: str
    expected: float | None
    got: float | None
    tolerance: float = math.nan
    verdict: str = ""
    reason: str = ""
    expected_status: str = "ok"
    status: str = "ok"
    evidence: str = ""
    profile: str = ""
    commit: str = ""
    dirty: bool | None = None
    config_sha256: str = ""
    expected_commit: str = ""

    @property
    def error(self) -> float:
        """Relative difference, absolute where zero is expected; 0 where both have no number, infinite where one has."""
        if self.expected is None or self.got is None:
            return 0.0 if self.expected is self.got else math.inf
        difference = abs(self.got - self.expected)
        return difference / abs(self.expected) if self.expected else difference

    def line(self) -> str:
        """The check in a line."""
        if self.verdict in ("MISSING", "left out"):
            what = f" {self.metric}: a line" if self.metric else ": a cell"
            whose = "required by the tolerances" if self.against == "claim" else f"of the {self.against}"
            return f"{self.verdict}: {self.table} {self.cell}{what} {whose} that is not here"
        expected, got = _said(self.expected, self.expected_status), _said(self.got, self.status)
        off = f"off by {self.error:.3g}, allowed {self.tolerance:.3g}"
        return f"{self.verdict}: {self.table} {self.cell} {self.metric}: {got}, {self.against} {expected}, {off}"


_CHECKED: Final = {"checked_commit": "commit", "checked_dirty": "dirty", "checked_utc": "started_utc",
                   "torch": "torch", "python": "python"}  # fmt: skip
"""Columns that say by what the checks were made -> the same of a run."""

CHECK_COLUMNS: Final = TABLES["checks"].columns


def read_tolerances(path: Path) -> list[Tolerance]:
    """The tolerances in a CSV file with the columns of :class:`Tolerance`; an empty tolerance requires nothing.

    Raises:
        ConfigError: it cannot be read, or lines are wrong; all problems.
    """
    table = read_table(path, _TOLERANCES, kind="tolerances", given=_TOLERANCES[:4], key=_TOLERANCES[:4])
    table["tolerance"] = table["tolerance"].fillna(math.inf)
    return [Tolerance(**line) for line in plain_records(table[[*_TOLERANCES]])]


def checks_of_rows(table: str, rows: pd.DataFrame, reference: pd.DataFrame) -> Iterator[Check]:
    """Every value of every simulated reference row beside that of the same cell; then the cells that are not here."""
    old, new = (kind[kind["evidence"] == "simulated"] for kind in (reference, rows))
    pairs = old.merge(new, on=[*_CELL], how="left", suffixes=(_OLD, ""), indicator=True)
    for pair in plain_records(pairs[pairs["_merge"] == "both"]):
        for metric in _METRICS:
            expected, got = pair[f"{metric}{_OLD}"], pair[metric]
            if expected is not None or got is not None:
                check = Check("reference", table, _name(pair), metric, expected, got, **origin_of(pair))
                whole = {"expected_status": pair[f"status{_OLD}"], "expected_commit": pair[f"commit{_OLD}"]}
                yield replace(check, status=pair["status"], **whole)
    for line in plain_records(pairs[pairs["_merge"] == "left_only"].drop_duplicates([*_CELL])):
        known = {"evidence": "simulated", "profile": line["profile"], "expected_commit": line[f"commit{_OLD}"]}
        yield lacking("reference", table, _name(line), "", **known)


def checks_of_emulations(table: str, rows: pd.DataFrame) -> Iterator[Check]:
    """Every emulated cell held to what the simulator says of it with the autograd engine of today.

    Where steps differ, a cell has several rows: its value is then the one in their range that is nearest. Of a cell
    that does not fit the memory of a device there is no value; it is as expected if the other does not fit, either.
    """
    keys = [name for name in _CELL if name != "flavour"]
    ran = rows[rows["status"].isin(("ok", "oom"))]
    simulated = ran[(ran["evidence"] == "simulated") & (ran["flavour"] == "current")].drop_duplicates(keys)
    for _, steps in ran[ran["evidence"] == "emulated"].groupby(keys, sort=False, dropna=False):
        head = plain_records(steps.head(1))[0]
        for twin in plain_records(simulated.merge(steps[keys].drop_duplicates(), on=keys)):
            known = {**origin_of(head), "expected_commit": twin["commit"]}
            known |= {"status": head["status"], "expected_status": twin["status"]}
            for metric in _AGREEING:
                values, expected = steps[metric].dropna(), twin[metric]
                got = float(values.min()) if len(values) else None
                if got is not None and expected is not None:
                    got = min(max(expected, got), float(values.max()))
                if expected is not None or got is not None:
                    yield Check("simulated", table, _name(head), metric, expected, got, **known)


def lacking(against: str, table: str, cell: str, metric: str, **known: Any) -> Check:
    """The check of a number that is not there; ``known``: what the reference says of it."""
    return Check(against, table, cell, metric, None, None, tolerance=0.0, verdict="MISSING", **known)


def left_out(check: Check) -> Check:
    """The check where a missing number may be left out."""
    return replace(check, verdict="left out") if check.verdict == "MISSING" else check


def judge(checks: Iterable[Check], tolerances: Sequence[Tolerance]) -> list[Check]:
    """The checks with their verdicts: ``ok``, ``OUTSIDE``, or ``not required``; those that have one keep it.

    Raises:
        ConfigError: no tolerance fits some of them; one line for each kind.
    """
    judged, unknown = [], {}
    for check in checks:
        if check.verdict:
            judged.append(check)
            continue
        tolerance = next((one for one in tolerances if one.fits(check)), None)
        if tolerance is None:
            kind = f"{check.against}, {check.table}, {check.metric}"
            unknown[kind] = f"tolerances must cover every check, got none for {kind}; add a line"
            continue
        verdict = "not required" if math.isinf(tolerance.tolerance) else "ok"
        # What is no number is within nothing.
        if math.isnan(check.error) or check.error > tolerance.tolerance:
            verdict = "OUTSIDE"
        judged.append(replace(check, tolerance=tolerance.tolerance, verdict=verdict, reason=tolerance.reason))
    if unknown:
        raise ConfigError(list(unknown.values()))
    return judged


def records(checks: Iterable[Check], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The checks as records of :data:`CHECK_COLUMNS`.

    Args:
        checks: with their verdicts.
        facts: by which code, when and with what they were made, from :func:`gpipe_bench.measure.host.host_facts`.
    """
    by = {name: facts[column] for name, column in _CHECKED.items()}
    return [{**asdict(check), **by, "schema_version": SCHEMA_VERSION} for check in checks]


def origin_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """What a line says of the run that gave its number; a table from elsewhere may say less."""
    found = {name: line.get(name, "") for name in ("evidence", "profile", "commit", "config_sha256")}
    return {**found, "dirty": line.get("dirty")}


def _said(value: float | None, status: str) -> str:
    """A number in words; of one that is not there, why."""
    if value is None:
        return "no value" if status == "ok" else status
    return f"{value:.6g}"


def _name(line: Mapping[str, Any]) -> str:
    pipeline = f"n{line['partitions']}-m{line['chunks']}-b{line['batch_size']}"
    return f"{pipeline}-{line['checkpoint']}-{line['variant']}"


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
    found: dict[str, list[Check]] = {}
    for line in plain_records(table):
        check = Check("claim", "transparency", line["name"], line["quantity"], 0.0, line["largest"], **origin_of(line))
        found.setdefault(line["model"], []).append(check)
    return found


def _is_held(check: Check, tolerances: Iterable[Tolerance]) -> bool:
    """Whether a number is required of it."""
    return next((math.isfinite(one.tolerance) for one in tolerances if one.fits(check)), False)
