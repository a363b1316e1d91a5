"""Two result sets in the terminal and as a table: a line per cell, then what all cells say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpipe_bench.bench.compare import CELL_KEYS, CellComparison, cells_tested, whole_shift
from gpipe_bench.bench.statistics import repeats_needed
from gpipe_bench.intervals import Interval

__all__ = ["RECORD_COLUMNS", "comparison_records", "comparison_view"]

RECORD_COLUMNS: Final = (
    *CELL_KEYS,
    *("profile", "metric", "status_reference", "status_new", "n_reference", "n_new", "median_reference", "median_new"),
    *("ratio", "ratio_low", "ratio_high", "p_value", "p_adjusted", "verdict"),
)
_STYLES: Final = {"differs": "bold yellow", "status changed": "bold red", "missing": "bold red", "new": "yellow"}
_APART: Final = ("evidence", "model", "model_args")
_TITLE: Final = ("partitions", "chunks", "batch_size", "checkpoint")
_READING: Final = (
    "ratio: median of B over median of A [bootstrapped 95 % interval]; p: Mann-Whitney, two-sided, adjusted for all "
    "measured cells of this table (Holm). Simulated and published values have no scatter: there any difference is one."
)


def comparison_records(cells: Sequence[CellComparison], metric: str) -> list[dict[str, Any]]:
    """A record of :data:`RECORD_COLUMNS` per cell; None where a cell has no such value."""
    return [_record(cell, metric) for cell in cells]


def comparison_view(cells: Sequence[CellComparison], metric: str) -> RenderableType:
    """A table per kind of evidence and model for one metric, and below them what was found."""
    groups: dict[tuple[object, ...], list[CellComparison]] = {}
    for cell in cells:
        groups.setdefault(tuple(getattr(cell.row, name) for name in _APART), []).append(cell)
    tables = [part for members in groups.values() for part in (_table(members, metric), Text())]
    return Group(*tables, _summary(cells))


def _table(cells: Sequence[CellComparison], metric: str) -> Table:
    """The cells of one model, with the columns in which they differ."""
    shown = [name for name in CELL_KEYS if len({getattr(cell.row, name) for cell in cells}) > 1] or ["variant"]
    facts = [str(getattr(cells[0].row, name)) for name in _APART]
    pipeline = [f"{name} {getattr(cells[0].row, name)}" for name in _TITLE if name not in shown]
    title = f"{metric}, {facts[0]}: {facts[1]} ({facts[2]}); {', '.join(pipeline)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in shown:
        table.add_column(name, no_wrap=True)
    for name in ("n A, B", "A", "B", "ratio B/A\n\\[95 % CI]", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for cell in cells:
        key = [str(getattr(cell.row, name)) for name in shown]
        table.add_row(*key, *_numbers(cell), _words(cell), style=_STYLES.get(cell.verdict, ""))
    return table


def _numbers(cell: CellComparison) -> list[str]:
    found = cell.comparison
    if found is None:
        return [""] * 5
    p_value = "" if cell.p_adjusted is None else f"{cell.p_adjusted:.3f}"
    medians = [f"{median(side):.4g}" for side in (cell.reference_values, cell.values)]
    return [f"{found.n_reference}, {found.n}", *medians, _interval(found.ratio), p_value]


def _interval(ratio: Interval) -> str:
    if ratio.n == 1:
        return f"{ratio.median:.4f}"
    return rf"{ratio.median:.3f} \[{ratio.low:.3f}, {ratio.high:.3f}]"


def _words(cell: CellComparison) -> str:
    if cell.verdict == "status changed":
        return f"{cell.reference_status} in A, {cell.status} in B"
    if cell.verdict in ("missing", "new"):
        return "in A alone" if cell.verdict == "missing" else "in B alone"
    return cell.verdict if cell.status == "ok" else f"{cell.status} in both"


def _summary(cells: Sequence[CellComparison]) -> Text:
    counts = Counter(cell.verdict for cell in cells)
    text = Text(f"{len(cells)} cells: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}.")
    if counts["too few repeats"]:
        tests = max(cells_tested(cells), 1)
        among = f" among the {tests} cells tested together" if tests > 1 else ""
        text.append(f"\nToo few repeats: a difference{among} can show from {repeats_needed(tests)} on each side on.")
    if whole := whole_shift(cells):
        ratio = _interval(whole.ratio).replace("\\", "")
        words = "geometric mean of ratios; permutation test within cells"
        text.append(f"\nAll {whole.cells} measured cells together: ratio {ratio}, p = {whole.p_value:.4f} ({words}).")
    return text.append(f"\n{_READING}\n", "dim")


def _record(cell: CellComparison, metric: str) -> dict[str, Any]:
    found, keys = cell.comparison, {name: getattr(cell.row, name) for name in CELL_KEYS}
    record = {**dict.fromkeys(RECORD_COLUMNS), **keys, "profile": cell.row.profile, "metric": metric}
    record |= {"status_reference": cell.reference_status, "status_new": cell.status, "verdict": cell.verdict}
    if found is not None:
        sized = found.ratio.n > 1
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
