"""Two result sets, cell by cell: what became faster, slower, or fails, and whether that is more than scatter.

Where many cells are compared some differ by chance. The p-values of measured cells are therefore adjusted together
(Holm 1979), which needs more repeats the more cells there are; a cell with too few says so instead of "no difference".
One more test asks all cells at once whether the sets are shifted against each other, which a few repeats of many
cells can answer. Simulated and published values have no scatter: there any difference is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

from gpipe_bench.bench.statistics import Comparison, Shift, compare_samples, enough_repeats, holm, shift
from gpipe_bench.rows import Row

__all__ = ["CELL_KEYS", "CellComparison", "cells_tested", "compare_rows", "distinct_rows", "whole_shift"]

CELL_KEYS: Final = (
    *("evidence", "model", "model_args", "variant", "backward", "transfer", "flavour", "partitions", "chunks"),
    *("checkpoint", "batch_size", "balance", "seed"),
)
"""What makes rows of two sets comparable; machine and versions may differ, that is what is compared."""

_LEVEL: Final = 0.05
_EXACT: Final = 1e-9


@dataclass(frozen=True, slots=True)
class CellComparison:
    """One cell in both sets.

    Attributes:
        row: a row of the cell, from the new set where it has one.
        status: of the new set: ``ok``, or the first other status; ``missing`` when it has no such cell.
        reference_status: the same of the reference.
        values: of the new set, one per repeat that ended well.
        reference_values: the same of the reference.
        comparison: of the two, where both sides have some.
        p_adjusted: for all cells of the same call together; None where the cell was not tested.
        verdict: ``differs``, ``equal``, ``no difference shown``, ``too few repeats``, ``status changed``,
            ``missing``, ``new``, or ``no value``.
    """

    row: Row
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
        return self.verdict not in ("differs", "status changed", "missing", "new")


def compare_rows(
    rows: Iterable[Row],
    reference: Iterable[Row],
    metric: str = "throughput_samples_per_s",
    *,
    across: Sequence[str] = (),
) -> list[CellComparison]:
    """Compare every cell that occurs in either set, in the order of the reference and then of the new one.

    Args:
        rows: the new rows.
        reference: the rows to compare with.
        metric: a numeric column.
        across: columns of :data:`CELL_KEYS` in which the two sides of a cell may differ, such as ``evidence``.

    Raises:
        ValueError: ``metric`` is no column, or a column of ``across`` is no key.
    """
    if metric not in Row.columns():
        raise ValueError(f"metric must be a column of a row, got {metric!r}; use one of {', '.join(Row.columns())}")
    numbers = [column.name for column in fields(Row) if str(column.type) in ("int | None", "float | None")]
    if metric not in numbers:
        raise ValueError(f"metric must be a column of numbers, got {metric!r}; use one of {', '.join(numbers)}")
    if strange := [name for name in across if name not in CELL_KEYS]:
        raise ValueError(f"across must name keys of a cell, got {strange[0]!r}; use one of {', '.join(CELL_KEYS)}")
    new, old = _grouped(rows, across), _grouped(reference, across)
    cells = [_compare(new.get(key, []), old.get(key, []), metric) for key in dict.fromkeys([*old, *new])]
    tested = [position for position, cell in enumerate(cells) if _testable(cell)]
    adjusted = holm([_p_value(cells[position]) for position in tested])
    for position, p_value in zip(tested, adjusted, strict=True):
        cells[position] = replace(cells[position], p_adjusted=p_value)
    return [replace(cell, verdict=_verdict(cell, len(tested))) for cell in cells]


def cells_tested(cells: Iterable[CellComparison]) -> int:
    """How many cells were tested together: those that alone have repeats enough to show a difference."""
    return sum(cell.p_adjusted is not None for cell in cells)


def whole_shift(cells: Iterable[CellComparison]) -> Shift | None:
    """Whether the measured cells as a whole lie above or below the reference; None where none can be compared."""
    found = [cell for cell in cells if cell.comparison and cell.row.evidence == "measured"]
    pairs = [(cell.values, cell.reference_values) for cell in found]
    positive = [pair for pair in pairs if min(map(min, pair)) > 0]
    return shift(positive) if positive else None


def distinct_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows, each run once: experiments that share a cell repeat its rows under their own names."""
    return list(dict.fromkeys(replace(row, experiment="") for row in rows))


def _grouped(rows: Iterable[Row], across: Sequence[str]) -> dict[tuple[object, ...], list[Row]]:
    names = [name for name in CELL_KEYS if name not in across]
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        # Two profiles of simulated hardware are two cells; two real machines are what is compared.
        hardware = row.profile if row.evidence == "simulated" and "evidence" in names else ""
        groups.setdefault((*(getattr(row, name) for name in names), hardware), []).append(row)
    return groups


def _compare(new: Sequence[Row], old: Sequence[Row], metric: str) -> CellComparison:
    values, base = _values(new, metric), _values(old, metric)
    # A share of zero has no ratio to it.
    comparison = compare_samples(values, base) if values and base and min(base) > 0 else None
    return CellComparison((new or old)[0], _status(new), _status(old), values, base, comparison)


def _values(rows: Sequence[Row], metric: str) -> tuple[float, ...]:
    found = [getattr(row, metric) for row in rows if row.status == "ok"]
    return tuple(float(value) for value in found if value is not None)


def _status(rows: Sequence[Row]) -> str:
    return next((row.status for row in rows if row.status != "ok"), "ok" if rows else "missing")


def _testable(cell: CellComparison) -> bool:
    found = cell.comparison
    return cell.row.evidence == "measured" and found is not None and enough_repeats(found.n, found.n_reference)


def _p_value(cell: CellComparison) -> float:
    return cell.comparison.p_value if cell.comparison else 1.0


def _verdict(cell: CellComparison, tests: int) -> str:
    if cell.reference_status == "missing":
        return "new"
    if cell.status == "missing":
        return "missing"
    if cell.status != cell.reference_status:
        return "status changed"
    found = cell.comparison
    if found is None:
        return "no value"
    if cell.row.evidence != "measured" or len({*cell.values, *cell.reference_values}) == 1:
        return "equal" if abs(found.ratio.median - 1) <= _EXACT else "differs"
    if cell.p_adjusted is not None and cell.p_adjusted <= _LEVEL:
        return "differs"
    if not enough_repeats(found.n, found.n_reference, max(tests, 1)):
        return "too few repeats"
    return "no difference shown"
