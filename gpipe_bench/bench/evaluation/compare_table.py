"""Two result sets in the terminal and as a table: a line per cell that differs, then what all cells say together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from gpipe_bench.bench.evaluation.compare import (
    CELL_KEYS,
    EXACT,
    CellComparison,
    cells_to_test,
    key_of,
)
from gpipe_bench.bench.evaluation.statistics import repeats_needed
from gpipe_bench.results.intervals import Interval
from gpipe_bench.results.schema import TABLES
from gpipe_bench.util.console import Column, Grid

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


def comparison_records(cells: Sequence[CellComparison], metric: str) -> list[dict[str, Any]]:
    """A record of :data:`RECORD_COLUMNS` per cell; None where a cell has no such value."""
    return [_record(cell, metric) for cell in cells]


def comparison_view(cells: Sequence[CellComparison], metric: str, *, every: bool = False) -> RenderableType:
    """The comparison of one metric, and the cells that differ in a table per kind of evidence and model.

    Args:
        cells: of :func:`gpipe_bench.bench.evaluation.compare.compare_rows`.
        metric: the column that was compared.
        every: show the other cells too.
    """
    groups: dict[tuple[object, ...], list[CellComparison]] = {}
    for cell in cells:
        if every or not cell.alike:
            groups.setdefault(tuple(key_of(cell.row, name) for name in _apart(cell)), []).append(cell)
    parts: list[RenderableType] = []
    for members in groups.values():
        counted = {} if every else {word: n for word, n in _alone(members).items() if n > _LISTED}
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


def _alone(cells: Sequence[CellComparison]) -> Counter[str]:
    return Counter(cell.verdict for cell in cells if cell.verdict in ("missing", "new"))


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
        text, style = _untold(untold, compared), "bold yellow"
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


def _untold(few: Mapping[str, int], compared: Mapping[str, Sequence[CellComparison]]) -> str:
    parts = [
        f"{name}: {n} of {cells_to_test(compared[name])} measured cells have too few repeats" for name, n in few.items()
    ]
    return f"cannot tell: {'; '.join(parts)}"


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
    if math.isnan(ratio.low) and cell.verdict == "differs" and f"{ratio.median:.4f}" == "1.0000":
        off = ratio.median - 1
        return f"1 {'-' if off < 0 else '+'} {abs(off):.1e}"
    return _interval(ratio)


def _interval(ratio: Interval) -> str:
    if math.isnan(ratio.low):
        return f"{ratio.median:.4f}"
    return f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


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


def _record(cell: CellComparison, metric: str) -> dict[str, Any]:
    found, keys = cell.comparison, {name: key_of(cell.row, name) for name in CELL_KEYS}
    record = {**dict.fromkeys(RECORD_COLUMNS), **keys, "profile": cell.row.profile, "metric": metric}
    record |= {"status_reference": cell.reference_status, "status_new": cell.status, "verdict": cell.verdict}
    if found is not None:
        sized = not math.isnan(found.ratio.low)
        record |= {
            "n_reference": found.n_reference,
            "n_new": found.n,
            "median_reference": median(cell.reference_values),
            "median_new": median(cell.values),
            "ratio": found.ratio.median,
            "ratio_low": found.ratio.low if sized else None,
            "ratio_high": found.ratio.high if sized else None,
            "p_value": found.p_value if cell.row.evidence == "measured" else None,
            "p_adjusted": cell.p_adjusted,
        }
    return record
