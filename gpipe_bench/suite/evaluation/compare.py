"""Two result sets, cell by cell: what became faster, slower, or fails, and whether that is more than scatter.

Each measured cell has a ratio of medians with its interval and a Mann-Whitney test on its repeats. Where many cells are
compared some differ by chance, so their p-values are adjusted together (Benjamini and Hochberg 1995); a cell with too
few repeats says so instead of "no difference". Simulated and published values have no scatter: there any difference
beyond rounding is one.

Rows of experiments and rows of the race of peers are compared alike; a key that one kind does not have is empty there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from gpipe_bench.results.intervals import LEVEL, Comparison, Interval, compare_samples, enough_repeats, repeats_needed
from gpipe_bench.results.rows import TINY, PeerRow, Record, Row
from gpipe_bench.results.schema import TABLES
from gpipe_bench.util.console import Column, Grid
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


RECORD_COLUMNS: Final = TABLES["comparisons"].columns
_STYLES: Final = {"differs": "bold yellow", "status changed": "bold red", "missing": "bold red", "new": "yellow",
                  "value missing": "bold red"}  # fmt: skip
_APART: Final = ("evidence", "workload", "model", "model_args")
_LONG: Final = 24
_LISTED: Final = 10
"""Cells that one set alone has, of one kind of evidence and model, up to which each has a line."""
_EVERY_DIGIT: Final = 17
"""Significant digits that tell any two numbers apart."""
_TITLE: Final = ("partitions", "chunks", "batch_size", "checkpoint")
_FEW: Final = "too few repeats"
_READING: Final = (
    "ratio: medians, B over A [95 % interval]; p: Mann-Whitney on the repeats of each cell, two-sided, adjusted for "
    "all measured cells of one column (Benjamini-Hochberg). No test tells slower code from a slower machine. Simulated "
    f"and published values have no scatter: they are equal within {EXACT:g} of the value; any other difference is one."
)


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
    tested = {}
    for position, cell in enumerate(cells):
        found = cell.comparison
        if found and cell.row.evidence == "measured" and enough_repeats(found.n, found.n_reference):
            tested[position] = found.p_value
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
        if len(values) == len(base) == 1:
            comparison = Comparison(Interval(1, values[0] / base[0], math.nan, math.nan), 1.0, 1, 1)
        else:
            comparison = compare_samples(values, base)
    return CellComparison(row, _status(new), _status(old), values, base, comparison)


def _values(rows: Sequence[AnyRow], metric: str) -> tuple[float, ...]:
    found = [getattr(row, metric, None) for row in rows if row.status == "ok"]
    return tuple(float(value) for value in found if value is not None)


def _status(rows: Sequence[AnyRow]) -> str:
    return next((row.status for row in rows if row.status != "ok"), "ok" if rows else "missing")


def _computed(cell: CellComparison) -> str:
    """The verdict on values that were computed, not measured."""
    values, reference = cell.values, cell.reference_values
    races = cell.row.evidence == "emulated" and max(len({*values}), len({*reference})) > 1
    if races and max(min(values), min(reference)) <= min(max(values), max(reference)):
        return "no difference shown"
    return "equal" if math.isclose(median(values), median(reference), rel_tol=EXACT) else "differs"


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


def comparison_records(cells: Sequence[CellComparison], metric: str) -> list[dict[str, Any]]:
    """A record of :data:`RECORD_COLUMNS` per cell; None where a cell has no such value."""
    records = []
    for cell in cells:
        record = dict.fromkeys(RECORD_COLUMNS) | {name: key_of(cell.row, name) for name in CELL_KEYS}
        record |= {"profile": cell.row.profile, "metric": metric, "verdict": cell.verdict}
        record |= {"status_reference": cell.reference_status, "status_new": cell.status}
        if (found := cell.comparison) is not None:
            ratio, sized = found.ratio, not math.isnan(found.ratio.low)
            record |= {
                "n_reference": found.n_reference,
                "n_new": found.n,
                "median_reference": median(cell.reference_values),
                "median_new": median(cell.values),
                "ratio": ratio.median,
                "ratio_low": ratio.low if sized else None,
                "ratio_high": ratio.high if sized else None,
                "p_value": found.p_value if cell.row.evidence == "measured" else None,
                "p_adjusted": cell.p_adjusted,
            }
        records.append(record)
    return records


def comparison_view(cells: Sequence[CellComparison], metric: str, *, every: bool = False) -> RenderableType:
    """The comparison of one metric, and the cells that differ in a table per kind of evidence and model.

    Args:
        cells: of :func:`gpipe_bench.suite.evaluation.compare.compare_rows`.
        metric: the column that was compared.
        every: show the other cells too.
    """
    groups: dict[tuple[object, ...], list[CellComparison]] = {}
    for cell in cells:
        if every or not cell.alike:
            groups.setdefault(tuple(key_of(cell.row, name) for name in _apart(cell)), []).append(cell)
    parts: list[RenderableType] = []
    for members in groups.values():
        alone = Counter(cell.verdict for cell in members if cell.verdict in ("missing", "new"))
        counted = {} if every else {word: n for word, n in alone.items() if n > _LISTED}
        listed = [cell for cell in members if cell.verdict not in counted]
        parts += [_table(listed, metric)] if listed else []
        facts = ", ".join(_facts(members[0]))
        for word, n in counted.items():
            side = "A" if word == "missing" else "B"
            parts.append(Text(f"{metric}; {facts}: {n} cells in {side} alone (--all: each of them)", _STYLES[word]))
        parts.append(Text())
    return Group(*parts, _summary(cells, metric))


def _facts(cell: CellComparison) -> list[str]:
    """What a table says of all its cells."""
    return [text for name in _apart(cell) if (text := str(key_of(cell.row, name)))]


def verdict_view(compared: Mapping[str, Sequence[CellComparison]]) -> RenderableType:
    """What all metrics say together, and how to read the numbers.

    Args:
        compared: the cells by metric.
    """
    cells = [cell for members in compared.values() for cell in members]
    speaking = Counter(cell.verdict for cell in cells if not cell.alike)
    reasons = [f"{count} {verdict}" for verdict, count in speaking.items()]
    if reasons:
        text, style = f"the two sets differ: {', '.join(reasons)}", "bold yellow"
    elif untold := undecided(compared):
        parts = (
            f"{name}: {n} of {cells_to_test(compared[name])} measured cells have too few repeats"
            for name, n in untold.items()
        )
        text, style = f"cannot tell: {'; '.join(parts)}", "bold yellow"
    elif any(cell.row.evidence == "measured" and cell.comparison for cell in cells):
        text, style = "no difference shown", "bold"
    else:
        text, style = ("equal" if any(cell.values for cell in cells) else "nothing to compare"), "bold"
    return Group(Text(f"Verdict: {text}.", style), Text(f"{_READING}\n", "dim"))


def differ(compared: Mapping[str, Sequence[CellComparison]]) -> bool:
    """Whether a cell differs in some metric."""
    return not all(cell.alike for cells in compared.values() for cell in cells)


def undecided(compared: Mapping[str, Sequence[CellComparison]]) -> dict[str, int]:
    """For each metric how many measured cells have too few repeats for any test, if there are some."""
    few = {name: sum(cell.verdict == _FEW for cell in cells) for name, cells in compared.items()}
    return {name: count for name, count in few.items() if count}


def _apart(cell: CellComparison) -> Sequence[str]:
    """The keys of the table that a cell stands in; all tiny layers of the race are in one."""
    return _APART[:2] if key_of(cell.row, "workload") else _APART


def _table(cells: Sequence[CellComparison], metric: str) -> Grid:
    """The cells of one model, with the columns in which they differ."""
    keys = [{name: str(key_of(cell.row, name)) for name in CELL_KEYS} for cell in cells]
    always = "contender" if keys[0]["contender"] else ""
    shown = [name for name in CELL_KEYS if name == always or len({key[name] for key in keys}) > 1] or ["variant"]
    for name in ("balance", "model_args"):
        rest = [other for other in shown if other != name]
        if rest and len({tuple(key[other] for other in rest) for key in keys}) == len(keys):
            shown = rest
    pipeline = [f"{name} {keys[0][name]}" for name in _TITLE if name not in shown]
    title = f"{metric}; {', '.join([*_facts(cells[0]), *pipeline])}"
    names = ("n A, B", "A", "B", "ratio B/A\n[95 % CI]", "p")
    columns = [*(Column(name, text=True) for name in shown), *map(Column, names), Column("verdict", text=True)]
    table = Grid(columns, title, keys=len(shown))
    for cell, key in zip(cells, keys, strict=True):
        words = [_short(key[name]) for name in shown]
        table.add(*words, *_numbers(cell), _words(cell), style=_STYLES.get(cell.verdict, ""))
    return table


def _short(text: str) -> str:
    """A long balance by its ends and its number of partitions."""
    parts = text.split("-")
    if len(text) <= _LONG or not all(part.isdigit() for part in parts):
        return text
    return f"{'-'.join(parts[:3])}-...-{'-'.join(parts[-2:])} ({len(parts)})"


def _numbers(cell: CellComparison) -> list[str]:
    found, sides = cell.comparison, (cell.reference_values, cell.values)
    if not any(sides):
        return [""] * 5
    medians = _medians(cell)
    p_value = "" if cell.p_adjusted is None else f"{cell.p_adjusted:.3f}"
    return [f"{len(sides[0])}, {len(sides[1])}", *medians, _ratio(cell) if found else "", p_value]


def _medians(cell: CellComparison) -> list[str]:
    """The medians of both sides, with four digits, or as many as show that they differ; empty where there is none."""
    values = [median(side) if side else None for side in (cell.reference_values, cell.values)]
    apart = cell.verdict == "differs" and values[0] != values[1]
    for digits in range(4, _EVERY_DIGIT + 1):
        words = ["" if value is None else f"{value:.{digits}g}" for value in values]
        if not apart or words[0] != words[1]:
            break
    return words


def _ratio(cell: CellComparison) -> str:
    """The ratio with its interval; of values without scatter that are almost the same, how far it is from 1."""
    ratio = cell.comparison.ratio if cell.comparison else Interval(0, math.nan, math.nan, math.nan)
    if not math.isnan(ratio.low):
        return f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
    if cell.verdict == "differs" and f"{ratio.median:.4f}" == "1.0000":
        off = ratio.median - 1
        return f"1 {'-' if off < 0 else '+'} {abs(off):.1e}"
    return f"{ratio.median:.4f}"


def _words(cell: CellComparison) -> str:
    if cell.verdict == "status changed":
        return f"{cell.reference_status} in A, {cell.status} in B"
    if cell.verdict in ("missing", "new"):
        return "in A alone" if cell.verdict == "missing" else "in B alone"
    return cell.verdict if cell.status == "ok" else f"{cell.status} in both"


def _summary(cells: Sequence[CellComparison], metric: str) -> Text:
    counts = Counter(cell.verdict for cell in cells)
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    text = Text(f"{metric}, {len(cells)} cells: {words}.")
    if counts[_FEW]:
        tests = cells_to_test(cells)
        among = f" of one of these {tests} cells alone" if tests > 1 else ""
        text.append(
            f"\nToo few repeats: a difference{among} shows from {repeats_needed(tests)} repeats on each side on."
        )
    return text
