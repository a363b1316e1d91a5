"""Two result sets, cell by cell: what became faster, slower, or fails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gpipe_bench.bench.statistics import Comparison, compare_samples
from gpipe_bench.rows import Row

__all__ = ["CellComparison", "compare_rows"]

_KEY: Final = (
    *("evidence", "model", "model_args", "variant", "backward", "transfer", "flavour", "partitions", "chunks"),
    *("checkpoint", "batch_size", "balance", "seed"),
)
"""What makes rows of two sets comparable; machine and versions may differ, that is what is compared."""


@dataclass(frozen=True, slots=True)
class CellComparison:
    """One cell in both sets.

    Attributes:
        row: a row of the cell, from the new set where it has one.
        status: of the new set: ``ok``, or the first other status; ``missing`` when it has no such cell.
        reference_status: the same of the reference.
        comparison: the values, where both sides have some.
    """

    row: Row
    status: str
    reference_status: str
    comparison: Comparison | None


def compare_rows(
    rows: Iterable[Row], reference: Iterable[Row], metric: str = "throughput_samples_per_s"
) -> list[CellComparison]:
    """Compare every cell that occurs in either set, in the order of the reference and then of the new one.

    Args:
        rows: the new rows.
        reference: the rows to compare with.
        metric: a numeric column.

    Raises:
        ValueError: ``metric`` is no column.
    """
    if metric not in Row.columns():
        raise ValueError(f"metric must be a column of a row, got {metric!r}; use one of {', '.join(Row.columns())}")
    new, old = _grouped(rows), _grouped(reference)
    return [_compare(new.get(key, []), old.get(key, []), metric) for key in dict.fromkeys([*old, *new])]


def _grouped(rows: Iterable[Row]) -> dict[tuple[object, ...], list[Row]]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in _KEY), []).append(row)
    return groups


def _compare(new: Sequence[Row], old: Sequence[Row], metric: str) -> CellComparison:
    values, base = _values(new, metric), _values(old, metric)
    comparison = compare_samples(values, base) if values and base else None
    return CellComparison((new or old)[0], _status(new), _status(old), comparison)


def _values(rows: Sequence[Row], metric: str) -> list[float]:
    found = [getattr(row, metric) for row in rows if row.status == "ok"]
    return [float(value) for value in found if value is not None]


def _status(rows: Sequence[Row]) -> str:
    return next((row.status for row in rows if row.status != "ok"), "ok" if rows else "missing")
