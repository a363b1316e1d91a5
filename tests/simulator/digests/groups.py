"""All groups, and how the lines of each come about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.simulator.digests.cases import Cases, Line
from tests.simulator.digests.commands import COMMANDS, lines_of
from tests.simulator.digests.grids import GRIDS
from tests.simulator.digests.model_cases import MODELLED
from tests.simulator.digests.random_cases import RANDOM

__all__ = ["CASES", "GROUPS", "lines"]

CASES: Final[dict[str, Cases]] = {**GRIDS, **RANDOM, **MODELLED}
"""Groups of cases that are listed here."""

GROUPS: Final = (*CASES, *COMMANDS)
"""Names of all groups."""


def lines(group: str) -> Iterator[Line]:
    """Run the cases of a group."""
    if group in COMMANDS:
        yield from lines_of(COMMANDS[group])
    else:
        yield from (case.line() for case in CASES[group]())
