"""From the tables of a run to reference results: rows sorted by evidence and by what they ran on.

``<folder>/simulated/<profile>/<experiment>.csv`` and ``<folder>/measured/<machine>/<experiment>.csv``, each with its
companions. Predictions of published cells go to the hardware of the published runs. Published rows are not taken: they
are made from ``<folder>/published`` whenever they are needed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpipe_bench.bench.datapackage.kinds import KINDS, kind_of
from gpipe_bench.bench.storage.tables import csv_text
from gpipe_bench.catalogue import COMPANION_SUFFIXES
from gpipe_bench.configurations import CONFIGURATION_COLUMNS
from gpipe_bench.errors import ConfigError
from gpipe_bench.files import write_files

__all__ = ["place_name", "result_tables", "take_reference"]

_TAKEN: Final = ("simulated", "measured")
_PREDICTIONS: Final = "predictions"
_PUBLISHED_ON: Final = "p40"  # the hardware of the published runs

Record = dict[str, str]


def result_tables(folder: Path) -> list[Path]:
    """The tables in a folder of results that can be taken: rows of experiments and predictions, companions left out.

    Raises:
        ConfigError: there is none.
    """
    paths = [path for path in sorted(folder.glob("*.csv")) if not path.stem.endswith(COMPANION_SUFFIXES)]
    wanted = {kind.columns for kind in KINDS if kind.records or kind.name == _PREDICTIONS}
    tables = [path for path in paths if tuple(_read(path)[0]) in wanted]
    if not tables:
        raise ConfigError([f"folder must hold tables of rows, got none in {folder}; run an experiment first"])
    return tables


def take_reference(rows: Path, folder: Path, machine: str = "") -> list[Path]:
    """Take the simulated and measured rows of an experiment, with their companions, or predictions, into ``folder``.

    Tables of the same experiment, evidence and hardware that are there already are replaced.

    Args:
        rows: ``<experiment>.csv`` as collect wrote it, or ``predictions.csv``.
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
    if kind.name == _PREDICTIONS:
        target = folder / "simulated" / _PUBLISHED_ON / rows.name
        texts = {target: csv_text(header, records), **_companions(rows, target, records, alone=True)}
        write_files(texts)
        return list(texts)
    if kind.records is None:
        raise ConfigError([f"table must be one of rows, got {kind.name} in {rows}; name <experiment>.csv itself"])
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["evidence"] in _TAKEN:
            where = machine if machine and record["evidence"] == "measured" else record["profile"]
            groups.setdefault((record["evidence"], place_name(where, rows)), []).append(record)
    if not groups:
        raise ConfigError([f"rows must hold simulated or measured ones, got none in {rows}; run the experiment first"])
    texts, targets = {}, []
    for (evidence, where), members in groups.items():
        target = folder / evidence / where / rows.name
        targets.append(target)
        texts[target] = csv_text(header, members)
        texts |= _companions(rows, target, members, alone=len(groups) == 1)
    write_files(texts)
    for target in targets:
        # What an earlier run left would lead to rows that are gone.
        for path in (_companion(target, suffix) for suffix in COMPANION_SUFFIXES):
            if path not in texts:
                path.unlink(missing_ok=True)
    return list(texts)


def _companions(rows: Path, target: Path, members: Sequence[Record], *, alone: bool) -> dict[Path, str]:
    """The companions of ``rows`` for ``target``: of these members alone, by their cells.

    Args:
        rows: the table that was taken.
        target: where its members go.
        members: rows of one evidence and hardware.
        alone: whether these are all rows; needed where companions do not name cells.
    """
    cells, digests = ({record.get(name, "") for record in members} for name in ("cell", "config_sha256"))
    texts: dict[Path, str] = {}
    for suffix in COMPANION_SUFFIXES:
        companion = _companion(rows, suffix)
        if not companion.exists():
            continue
        header, lines = _read(companion)
        if tuple(header) == CONFIGURATION_COLUMNS:
            own = [line for line in lines if line["config_sha256"] in digests]
        elif "cell" in header:
            own = [line for line in lines if line["cell"] in cells]
        elif alone:
            own = lines
            digests |= {line.get("config_sha256", "") for line in lines}
        else:
            raise ConfigError([f"rows must be of one machine where {companion} names no cells, got several; part them"])
        if own:
            texts[_companion(target, suffix)] = csv_text(header, own)
    return texts


def _companion(rows: Path, suffix: str) -> Path:
    return rows.with_name(f"{rows.stem}{suffix}.csv")


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
