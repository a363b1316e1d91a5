"""Digests on disk, a file for each group, and what differs from them."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tests.simulator.digests.cases import Line
from tests.simulator.digests.digest import FIELDS, INPUT

__all__ = ["Difference", "differences", "is_stored", "read", "write"]

FOLDER: Final = Path(__file__).parent / "stored"
_COLUMNS: Final = ("case", INPUT, *FIELDS)

Difference = tuple[str, tuple[str, ...]]
"""A case, and the fields that differ."""


def _path(group: str) -> Path:
    return FOLDER / f"{group}.csv.gz"


def is_stored(group: str) -> bool:
    """Whether a group has digests."""
    return _path(group).is_file()


def write(group: str, lines: Iterable[Line]) -> None:
    """Store the digests of a group, whole or not at all."""
    text = io.StringIO()
    table = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    FOLDER.mkdir(exist_ok=True)
    beside = _path(group).with_suffix(".part")
    # Without a time of its own the same lines are the same bytes.
    beside.write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))
    beside.replace(_path(group))


def read(group: str) -> dict[str, Line]:
    """The digests of a group by case."""
    text = gzip.decompress(_path(group).read_bytes()).decode()
    return {line["case"]: line for line in csv.DictReader(io.StringIO(text))}


def differences(stored: dict[str, Line], lines: Iterable[Line]) -> list[Difference]:
    """Cases that are not as they were stored.

    Where the workload, machine or settings are others, nothing else is looked at: then the case is another one.
    """
    found: list[Difference] = []
    for line in lines:
        before = stored.get(line["case"])
        if before is None:
            found.append((line["case"], ("not stored",)))
        elif before[INPUT] != line[INPUT]:
            found.append((line["case"], (INPUT,)))
        elif wrong := tuple(name for name in FIELDS if before[name] != line[name]):
            found.append((line["case"], wrong))
    return found
