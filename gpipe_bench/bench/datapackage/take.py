"""From the tables of a run to reference results: rows sorted by evidence and by what they ran on.

``<folder>/simulated/<profile>/<experiment>.csv`` and ``<folder>/measured/<machine>/<experiment>.csv``, each with its
companions. Published rows are not taken: they are made from ``<folder>/published`` whenever they are needed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpipe_bench.bench.datapackage.fields import kind_of
from gpipe_bench.bench.files import write_files
from gpipe_bench.bench.tables import COMPANIONS, companion_path, csv_text
from gpipe_bench.errors import ConfigError

__all__ = ["place_name", "take_reference"]

_TAKEN: Final = ("simulated", "measured")
_DIGITS: Final = 8  # of the digest of a configuration, at the end of a cell's name

Record = dict[str, str]


def take_reference(rows: Path, folder: Path, machine: str = "") -> list[Path]:
    """Take the simulated and measured rows of an experiment, with their companions, into ``folder``.

    Tables of the same experiment, evidence and hardware that are there already are replaced.

    Args:
        rows: ``<experiment>.csv`` as collect wrote it.
        folder: the reference results.
        machine: name of the folder of measured rows; by default made from their column ``profile``.

    Returns:
        The files written.

    Raises:
        ConfigError: a table cannot be read, is of another kind, or has nothing to take.
        OutputError: a file cannot be written.
    """
    header, records = _read(rows)
    kind = kind_of(header, rows)
    if kind.name != "rows":
        raise ConfigError([f"table must be one of rows, got {kind.name} in {rows}; name <experiment>.csv itself"])
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["evidence"] in _TAKEN:
            where = machine if machine and record["evidence"] == "measured" else record["profile"]
            groups.setdefault((record["evidence"], place_name(where, rows)), []).append(record)
    if not groups:
        raise ConfigError([f"rows must hold simulated or measured ones, got none in {rows}; run the experiment first"])
    companions = {name: _read(companion_path(rows, name)) for name in COMPANIONS if companion_path(rows, name).exists()}
    texts: dict[Path, str] = {}
    for (evidence, where), members in groups.items():
        target = folder / evidence / where / rows.name
        texts[target] = csv_text(header, members)
        cells = {record["config_sha256"][:_DIGITS] for record in members}
        for name, (columns, lines) in companions.items():
            own = [line for line in lines if line["cell"][-_DIGITS:] in cells]
            if own:
                texts[companion_path(target, name)] = csv_text(columns, own)
    write_files(texts)
    return list(texts)


def place_name(text: str, rows: Path) -> str:
    """The name of a folder for hardware: small letters, digits and single dashes.

    Raises:
        ConfigError: nothing is left of ``text``.
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name:
        raise ConfigError(
            [f"rows must name their hardware in the column profile, got {text!r} in {rows}; pass --machine NAME"]
        )
    return name


def _read(path: Path) -> tuple[Sequence[str], list[Record]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="")
            lines: list[Mapping[str, str]] = list(reader)
            return list(reader.fieldnames or ()), [dict(line) for line in lines]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError([f"table must be a readable CSV file, got {path} ({error}); collect it first"]) from error
