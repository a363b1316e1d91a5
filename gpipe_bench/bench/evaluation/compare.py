"""Two result sets, cell by cell: what became faster, slower, or fails, and whether that is more than scatter.

Each measured cell has a ratio of medians with its interval and a Mann-Whitney test on its repeats. Where many cells are
compared some differ by chance, so their p-values are adjusted together (Benjamini and Hochberg 1995); a cell with too
few repeats says so instead of "no difference". Simulated and published values have no scatter: there any difference
beyond rounding is one.

Rows of experiments and rows of the race of peers are compared alike; a key that one kind does not have is empty there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Final

from gpipe_bench.bench.evaluation.statistics import LEVEL, Comparison, compare_samples, enough_repeats
from gpipe_bench.results.intervals import Interval
from gpipe_bench.results.peer_rows import TINY, PeerRow
from gpipe_bench.results.rows import Record, Row
from gpipe_bench.util.nearest import nearest

AnyRow = Row | PeerRow

CELL_KEYS: Final = (
    *("evidence", "workload", "contender", "model", "model_args", "variant", "backward", "schedule", "transfer"),
    *("flavour", "partitions", "chunks", "checkpoint", "batch_size", "balance", "threads", "seed"),
    *("processes", "hosts", "steps_overlap", "precision", "optimizer"),
)
"""What makes rows of two sets comparable; machine and versions may differ, that is what is compared."""

METRICS: Final = (
    *("throughput_samples_per_s", "step_time_ms", "peak_allocated_gib", "peak_reserved_gib", "utilization_fraction"),
    *("bubble_fraction", "copy_fraction", "recompute_fraction", "imbalance_fraction", "host_time_per_cell_us"),
)
"""Columns that are compared where none is asked for; :func:`usual_metrics` says which of them for a row."""

_UNSAID: Final = {"steps_overlap": True, "precision": "float32"}
"""What rows are taken for that do not say it: those of older tables, and measured ones."""

_TAKEN_ALONG: Final = {"evidence": ("flavour",)}
"""Keys that only rows of some evidence have: across that, they tell nothing apart."""

EXACT: Final = 1e-9
"""Relative difference up to which values without scatter are equal: the last digits of a sum may differ."""


@dataclass(frozen=True, slots=True)
class CellComparison:
    """One cell in both sets.

    Attributes:
        row: a row of the cell, of an experiment or of the race, from the new set where it has one.
        status: of the new set: ``ok``, or the first other status; ``missing`` when it has no such cell.
        reference_status: the same of the reference.
        values: of the new set, one per repeat that ended well.
        reference_values: the same of the reference.
        comparison: of the two, where both sides have some.
        p_adjusted: for all cells of the same call together; None where the cell was not tested.
        verdict: ``differs``, ``equal``, ``no difference shown``, ``too few repeats``, ``status changed``,
            ``missing``, ``new``, ``value missing`` on one side, or ``no value`` to compare on either.
    """

    row: AnyRow
    status: str
    reference_status: str
    values: tuple[float, ...]
    reference_values: tuple[float, ...]
    comparison: Comparison | None
    p_adjusted: float | None = None
    verdict: str = ""

    @property
    def alike(self) -> bool:
        """Whether nothing speaks against the two sets being the same here."""
        return self.verdict not in ("differs", "status changed", "missing", "new", "value missing")


def compare_rows(
    rows: Iterable[AnyRow],
    reference: Iterable[AnyRow],
    metric: str = "throughput_samples_per_s",
    *,
    across: Sequence[str] = (),
) -> list[CellComparison]:
    """Compare every cell that occurs in either set, in the order of the reference and then of the new one.

    Args:
        rows: the new rows.
        reference: the rows to compare with.
        metric: a numeric column.
        across: columns of :data:`CELL_KEYS` in which the two sides of a cell may differ, such as ``evidence``; that
            takes ``flavour`` along, which simulations alone have.

    Raises:
        ValueError: ``metric`` is no column, or a column of ``across`` is no key.
    """
    columns = {column.name: str(column.type) for kind in (Row, PeerRow) for column in fields(kind)}
    if metric not in columns:
        raise ValueError(f"metric must be a column of a row, got {metric!r}; {nearest(metric, columns)}")
    numbers = [name for name, kind in columns.items() if kind in ("int | None", "float | None")]
    if metric not in numbers:
        raise ValueError(f"metric must be a column of numbers, got {metric!r}; use one of {', '.join(numbers)}")
    if strange := [name for name in across if name not in CELL_KEYS]:
        raise ValueError(f"across must name keys of a cell, got {strange[0]!r}; use one of {', '.join(CELL_KEYS)}")
    rows, reference = list(rows), list(reference)
    if not all(key_of(row, "optimizer") for row in (*rows, *reference)):
        # Rows of older tables and of other programs do not say their optimizer.
        across = (*across, "optimizer")
    new, old = _grouped(rows, across), _grouped(reference, across)
    cells = [_compare(new.get(key, []), old.get(key, []), metric) for key in dict.fromkeys([*old, *new])]
    tested = {position: found.p_value for position, cell in enumerate(cells) if (found := _tested(cell))}
    if tested:
        # scipy takes most of a second to load.
        from scipy.stats import false_discovery_control

        for position, p_value in zip(tested, false_discovery_control([*tested.values()]), strict=True):
            cells[position] = replace(cells[position], p_adjusted=float(p_value))
    return [replace(cell, verdict=_verdict(cell, len(tested))) for cell in cells]


def usual_metrics(row: AnyRow) -> tuple[str, ...]:
    """What is compared of a row if nothing else is asked for.

    Everything where values have no scatter; of a measured row its throughput, of tiny layers in the race the host time.
    """
    if isinstance(row, PeerRow) and row.workload in TINY:
        return ("host_time_per_cell_us",)
    return METRICS[:1] if row.evidence == "measured" else METRICS[:-1]


def key_of(row: Record, name: str) -> object:
    """A key of :data:`CELL_KEYS`; empty where rows of this kind have none."""
    return getattr(row, name, "")


def cells_to_test(cells: Iterable[CellComparison]) -> int:
    """How many cells have measured values on both sides."""
    return sum(cell.row.evidence == "measured" and cell.comparison is not None for cell in cells)


def distinct_rows(rows: Iterable[AnyRow]) -> list[AnyRow]:
    """The rows, each run once: experiments that share a cell repeat its rows under their own names."""
    bare = (replace(row, sweep_kind="") if isinstance(row, Row) else row for row in rows)
    return list(dict.fromkeys(replace(row, experiment="") for row in bare))


def _grouped(rows: Iterable[AnyRow], across: Sequence[str]) -> dict[tuple[object, ...], list[AnyRow]]:
    apart = {other for name in across for other in (name, *_TAKEN_ALONG.get(name, ()))}
    names = [name for name in CELL_KEYS if name not in apart]
    groups: dict[tuple[object, ...], list[AnyRow]] = {}
    for row in rows:
        # Two profiles of simulated or emulated hardware are two cells; two real machines are what is compared.
        hardware = row.profile if row.evidence in ("simulated", "emulated") and "evidence" in names else ""
        groups.setdefault((*(_meant(row, name) for name in names), hardware), []).append(row)
    return groups


def _meant(row: AnyRow, name: str) -> object:
    said = key_of(row, name)
    return _UNSAID.get(name, said) if said in (None, "") else said


def _compare(new: Sequence[AnyRow], old: Sequence[AnyRow], metric: str) -> CellComparison:
    values, base = _values(new, metric), _values(old, metric)
    row, comparison = (new or old)[0], None
    # A share of zero has no ratio to it.
    if values and base and min(base) > 0:
        single = len(values) == len(base) == 1
        comparison = _single(values[0] / base[0]) if single else compare_samples(values, base)
    return CellComparison(row, _status(new), _status(old), values, base, comparison)


def _single(ratio: float) -> Comparison:
    """Of one value and another: no interval, and nothing to test."""
    return Comparison(Interval(1, ratio, math.nan, math.nan), 1.0, 1, 1)


def _values(rows: Sequence[AnyRow], metric: str) -> tuple[float, ...]:
    found = [getattr(row, metric, None) for row in rows if row.status == "ok"]
    return tuple(float(value) for value in found if value is not None)


def _status(rows: Sequence[AnyRow]) -> str:
    return next((row.status for row in rows if row.status != "ok"), "ok" if rows else "missing")


def _tested(cell: CellComparison) -> Comparison | None:
    """What a cell says to the test: a measured one whose repeats can show a difference."""
    found = cell.comparison
    return found if found and cell.row.evidence == "measured" and enough_repeats(found.n, found.n_reference) else None


def _computed(cell: CellComparison) -> str:
    """The verdict on values that were computed, not measured."""
    if cell.row.evidence == "emulated" and _overlap(cell.values, cell.reference_values):
        return "no difference shown"
    pair = median(cell.values), median(cell.reference_values)
    return "equal" if math.isclose(*pair, rel_tol=EXACT) else "differs"


def _overlap(values: Sequence[float], reference: Sequence[float]) -> bool:
    """Whether host threads race in an emulated cell, and the ranges of its steps have a value in common."""
    several = max(len({*values}), len({*reference})) > 1
    return several and max(min(values), min(reference)) <= min(max(values), max(reference))


def _verdict(cell: CellComparison, tests: int) -> str:
    if cell.reference_status == "missing":
        return "new"
    if cell.status == "missing":
        return "missing"
    if cell.status != cell.reference_status:
        return "status changed"
    if bool(cell.values) != bool(cell.reference_values):
        return "value missing"
    if not cell.values:
        return "no value"
    if cell.row.evidence != "measured" or len({*cell.values, *cell.reference_values}) == 1:
        return _computed(cell)
    found = cell.comparison
    if found is None:
        return "no value"
    if cell.p_adjusted is not None and cell.p_adjusted <= LEVEL:
        return "differs"
    if not enough_repeats(found.n, found.n_reference, max(tests, 1)):
        return "too few repeats"
    return "no difference shown"
