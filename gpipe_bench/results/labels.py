"""What rows say in words, so that a ``groupby`` of three lines compares like with like."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import csv_text

LOOP: Final = "plain loop"
MICROBATCH_LOOP: Final = "micro-batch loop"
PAPER: Final = "paper's executor"
ONE_THREAD: Final = "one thread per partition's operators"
"""How the ablation on a CPU runs every partition, so that partitions do not compete for cores."""

_AUTOGRAD: Final = {"published": "PyTorch 1.3", "current": "PyTorch 2"}
_SERIES: Final = {"batch_size": "fixed batch", "microbatch": "fixed micro-batch"}


def rows_text(rows: Iterable[Row]) -> str:
    """A table of rows as text, with the columns that :func:`labelled` adds."""
    return csv_text(Row.columns(), [row.to_dict() for row in labelled(list(rows))])


def labelled(rows: Sequence[Row]) -> list[Row]:
    """The rows of one table with ``run_as``, ``autograd`` and ``sweep_kind``."""
    series = _series(rows)
    return [
        replace(row, run_as=run_as(row), autograd=_AUTOGRAD.get(row.flavour, ""), sweep_kind=_kind(row, series))
        for row in rows
    ]


def autograd_words(row: Row) -> str:
    """Whose autograd engine a simulation is of, after a comma; empty for every other row."""
    return f", autograd of {_AUTOGRAD[row.flavour]}" if row.flavour else ""


def training_words(row: Row) -> str:
    """What differs from float32, SGD and steps that overlap, joined by commas; empty where nothing does."""
    words = [name for name in (row.precision, row.optimizer) if name not in ("", "float32", "sgd")]
    return ", ".join([*words, *(["steps do not overlap"] if row.steps_overlap is False else [])])


def run_as(row: Row) -> str:
    """How a row was run: a loop, the paper's executor, or a schedule by name; empty for the runs of other programs."""
    if row.evidence == "published" or row.source:
        return ""
    if row.backward == "scheduled":
        return row.schedule
    if (row.partitions, row.evidence, row.checkpoint) == (1, "measured", "never"):
        return LOOP if row.chunks == 1 else MICROBATCH_LOOP
    return PAPER


def _kind(row: Row, series: dict[tuple[object, ...], set[int | None]]) -> str:
    """What stays the same in a sweep while the number of micro-batches changes; ``both`` where two series meet."""
    if not row.experiment.startswith("sweep_"):
        return ""
    own = [words for name, words in _SERIES.items() if len(series[_key(row, name)]) > 1]
    return "both" if len(own) == len(_SERIES) else "".join(own)


def _series(rows: Iterable[Row]) -> dict[tuple[object, ...], set[int | None]]:
    """The numbers of micro-batches of each series."""
    found: defaultdict[tuple[object, ...], set[int | None]] = defaultdict(set)
    for row in rows:
        for name in _SERIES:
            found[_key(row, name)].add(row.chunks)
    return found


def _key(row: Row, name: str) -> tuple[object, ...]:
    size = row.batch_size if name == "batch_size" else (row.batch_size or 0) / (row.chunks or 1)
    return (name, size, row.evidence, row.profile, row.partitions, row.checkpoint, row.schedule)
