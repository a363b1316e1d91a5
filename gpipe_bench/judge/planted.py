"""Faults of public reports, each planted in the reference by a few lines.

A fault names the report in which somebody met its kind, and how much of that report was read. Behaviours of ``must``
catch it, those of ``must_not`` do not see it: a fault that every behaviour catches may be planted wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gpipe_bench.judge.reference import Pipeline


@dataclass(frozen=True, slots=True)
class Fault:
    """A planted fault.

    Attributes:
        report: ``owner/repository#number``.
        read: ``opening`` if its first post was read to its end, ``excerpt`` if a part of it.
        says: what the fault does.
        kind: the reference with the fault.
        must: behaviours that catch it.
        must_not: behaviours that do not.
        schedule: under which it is planted.
    """

    report: str
    read: Literal["opening", "excerpt"]
    says: str
    kind: type[Pipeline]
    must: tuple[str, ...]
    must_not: tuple[str, ...]
    schedule: str


FAULTS: dict[str, Fault] = {}
"""The faults, by the names of their classes."""


def fault(  # noqa: PLR0917 - reads as a row of a table
    report: str, read: Literal["opening", "excerpt"], says: str, must: str, must_not: str, schedule: str = "1f1b"
) -> Callable[[type[Pipeline]], type[Pipeline]]:
    """Keep a class as a fault; names of behaviours are separated by commas."""

    def keep(kind: type[Pipeline]) -> type[Pipeline]:
        FAULTS[kind.__name__] = Fault(report, read, says, kind, _names(must), _names(must_not), schedule)
        return kind

    return keep


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))
