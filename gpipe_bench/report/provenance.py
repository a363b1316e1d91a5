"""Where every number of the page comes from: the files, their digests, and what the rows say of their runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpipe_bench.results.tables import read_text

if TYPE_CHECKING:
    import pandas as pd

_FACTS: Final = ("evidence", "device", "profile", "torch", "cuda", "driver", "python", "commit", "dirty", "source")
_NAMED_AT_MOST: Final = 6


@dataclass(frozen=True, slots=True)
class Origin:
    """One file behind the page.

    Attributes:
        name: path below the folder of results.
        sha256: digest of its bytes.
        lines: without the header.
        facts: the columns that describe the run, its machine and its packages, with their values.
    """

    name: str
    sha256: str
    lines: int
    facts: list[tuple[str, str]]


def origin(path: Path, folder: Path) -> Origin:
    """What a table says of where it comes from.

    Args:
        path: a CSV file that was read before.
        folder: its name is given below this.
    """
    table = read_text(path)
    facts = [(name, _values(table[name])) for name in _FACTS if name in table]
    started = sorted({*table.get("started_utc", ())} - {""})
    if started:
        facts.append(("started", started[0] if started[0] == started[-1] else f"{started[0]} to {started[-1]}"))
    return Origin(
        path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name,
        hashlib.sha256(path.read_bytes()).hexdigest(),
        len(table),
        [(name, text) for name, text in facts if text],
    )


def _values(values: pd.Series) -> str:
    found = [value for value in values.unique() if value]
    return ", ".join(found) if len(found) <= _NAMED_AT_MOST else f"{len(found)} different"
