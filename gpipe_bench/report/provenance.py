"""Where every number of the page comes from: the files, their digests, and what the rows say of their runs."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Origin", "origin"]

_FACTS: Final = ("evidence", "device", "profile", "torch", "cuda", "driver", "python", "commit", "dirty", "source")
_NAMED_AT_MOST: Final = 6


@dataclass(frozen=True, slots=True)
class Origin:
    """One file behind the page.

    Attributes:
        name: path below the folder of results.
        sha256: digest of its bytes.
        lines: without the header.
        facts: column and its values, of those columns that say what was run, where and with what.
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
    content = path.read_bytes()
    records = list(csv.DictReader(io.StringIO(content.decode("utf-8"), newline="")))
    facts = [(name, _values([record.get(name) or "" for record in records])) for name in _FACTS]
    started = sorted(record["started_utc"] for record in records if record.get("started_utc"))
    if started:
        facts.append(("started", started[0] if started[0] == started[-1] else f"{started[0]} to {started[-1]}"))
    return Origin(
        path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name,
        hashlib.sha256(content).hexdigest(),
        len(records),
        [(name, text) for name, text in facts if text],
    )


def _values(values: Sequence[str]) -> str:
    found = list(dict.fromkeys(value for value in values if value))
    return ", ".join(found) if len(found) <= _NAMED_AT_MOST else f"{len(found)} different"
