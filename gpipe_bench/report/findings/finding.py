"""One finding, and the words that findings share: changes in percent, machines, numbers beside published ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpipe_bench.figures.text import TIMES
from gpipe_bench.results.rows import Row

NBSP: Final = "\u00a0"
_MINUS: Final = "\N{MINUS SIGN}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A few sentences on one thing.

    Attributes:
        topic: what it is about, in a word or two.
        evidence: the kinds of evidence behind it, in the order of :data:`gpipe_bench.results.rows.EVIDENCE`.
        where: the hardware and setting.
        sentences: plain text, the most important first.
        section: name of the table whose section shows the rows.
        shown: how many sentences stand open; the page folds the others.
    """

    topic: str
    evidence: tuple[str, ...]
    where: str
    sentences: tuple[str, ...]
    section: str
    shown: int = 9


def percent(ratio: float) -> str:
    """A ratio as a change: 1.39 is ``+39 %``, 0.8 is ``-20 %`` with a true minus sign."""
    change = 100 * (ratio - 1)
    digits = 1 if abs(change) < 9.95 else 0
    text = f"{change:+.{digits}f}"
    if float(text) == 0:
        return f"0{NBSP}%"
    return f"{text.replace('-', _MINUS)}{NBSP}%"


def share(fraction: float) -> str:
    """A share in percent: ``42 %``."""
    return f"{100 * fraction:.0f}{NBSP}%"


def plural(count: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count}{NBSP}{noun}{'' if count == 1 else 's'}"


def machine(row: Row) -> str:
    """The hardware of a row: ``4 x cuda Tesla P40``."""
    name = row.device or row.profile
    count = row.device_count or 1
    return f"{count}{NBSP}{TIMES}{NBSP}{name}" if name and count > 1 else name


def model_words(row: Row) -> str:
    """The model with the arguments that make its size, which stand first."""
    sizes = row.model_args.split(";")[:3]
    return f"{row.model} ({', '.join(sizes)})" if row.model_args else row.model


def setting(row: Row) -> str:
    """Model, hardware and pipeline of a row."""
    numbers = ((row.partitions, "partition"), (row.chunks, "chunk"))
    parts = [plural(count, noun) for count, noun in numbers if count]
    parts += [f"batch{NBSP}{row.batch_size}"] if row.batch_size else []
    return "; ".join(filter(None, (model_words(row), machine(row), ", ".join(parts))))
