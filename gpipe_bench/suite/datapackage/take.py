"""From the tables of a run to reference results: rows sorted by evidence and by what they ran on.

``<folder>/simulated/<profile>/<experiment>.csv``, ``<folder>/emulated/<profile>/<experiment>.csv`` and
``<folder>/measured/<machine>/<experiment>.csv``, each with its companions. Predictions of published cells go to the
profile of each. Published rows are not taken: they are made from ``<folder>/published`` when they are
needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.results.catalogue import COMPANION_SUFFIXES
from gpipe_bench.results.configurations import CONFIGURATION_COLUMNS
from gpipe_bench.results.schema import OF_RUNS, TABLES, table_of
from gpipe_bench.results.tables import csv_text, header_of, read_table, read_text
from gpipe_bench.suite.names import readable
from gpipe_bench.util.files import write_files

if TYPE_CHECKING:
    import pandas as pd

_TAKEN: Final = ("simulated", "emulated", "measured")
_PREDICTIONS: Final = "predictions"


def result_tables(folder: Path) -> list[Path]:
    """The tables in a folder of results that can be taken: rows of experiments and predictions, companions left out.

    Raises:
        ConfigError: there is none.
    """
    paths = [path for path in sorted(folder.glob("*.csv")) if not path.stem.endswith(COMPANION_SUFFIXES)]
    wanted = {TABLES[name].columns for name in (*OF_RUNS, _PREDICTIONS)}
    tables = [path for path in paths if tuple(read_text(path).columns) in wanted]
    if not tables:
        raise ConfigError([f"folder must hold tables of rows, got none in {folder}; run an experiment first"])
    return tables


def take_reference(
    rows: Path, folder: Path, machine: str = "", tell: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """Take the rows of an experiment that are not published, with companions, or predictions, into ``folder``.

    Tables of the same experiment, evidence and hardware that are there already are replaced.

    Args:
        rows: ``<experiment>.csv`` as collect wrote it, or ``predictions.csv``.
        folder: the reference results.
        machine: name of the folder of measured rows; by default made from their column ``profile``.
        tell: takes a line for each table that replaces rows of another commit.

    Returns:
        The files written.

    Raises:
        ConfigError: a table cannot be read, is of another kind, or has nothing to take.
        OutputError: a file cannot be written.
    """
    table = _checked(rows)
    kind = table_of(list(table.columns), rows)
    if kind.name == _PREDICTIONS:
        taken: dict[Path, str] = {}
        for profile, members in table.groupby("profile", sort=False):
            target = folder / "simulated" / str(profile) / rows.name
            _tell_commits(target, members, tell)
            taken |= {target: csv_text(kind.columns, members), **_companions(rows, target, members, alone=True)}
        write_files(taken)
        return list(taken)
    if kind.name not in OF_RUNS:
        raise ConfigError([f"table must be one of rows, got {kind.name} in {rows}; name <experiment>.csv itself"])
    chosen = table[table["evidence"].isin(_TAKEN)]
    if chosen.empty:
        raise ConfigError(
            [f"rows must hold simulated, emulated or measured ones, got none in {rows}; run the experiment first"]
        )
    measured = chosen["evidence"] == "measured"
    machines = {*chosen["profile"][measured]} - {""}
    machine = machine or (machines.pop() if len(machines) == 1 else "")
    # A cell that did not run does not know its machine.
    hardware = chosen["profile"].mask(measured, machine) if machine else chosen["profile"]
    places = chosen["evidence"] + "/" + hardware.map(lambda name: place_name(name, rows))
    texts, targets = {}, []
    for place, members in chosen.groupby(places, sort=False):
        target = folder / str(place) / rows.name
        targets.append(target)
        _tell_commits(target, members, tell)
        texts[target] = csv_text(kind.columns, members)
        texts |= _companions(rows, target, members, alone=len(members) == len(chosen))
    write_files(texts)
    for target in targets:
        # What an earlier run left would lead to rows that are gone.
        for path in (_companion(target, suffix) for suffix in COMPANION_SUFFIXES):
            if path not in texts:
                path.unlink(missing_ok=True)
    return list(texts)


def _tell_commits(target: Path, members: pd.DataFrame, tell: Callable[[str], None]) -> None:
    """Say which commits the rows are of that are replaced, and those that replace them, where these differ."""
    old = read_text(target, listed=False) if target.is_file() else None
    if old is None or "commit" not in old:
        return
    before, now = ({*table["commit"]} - {""} for table in (old, members))
    if before != now:
        was, now_is = (", ".join(sorted(name[:12] for name in names)) or "none" for names in (before, now))
        tell(f"{target}: rows of commit {now_is} replace those of {was}")


def _companions(rows: Path, target: Path, members: pd.DataFrame, *, alone: bool) -> dict[Path, str]:
    """The companions of ``rows`` for ``target``: of these members alone, by their cells.

    Args:
        rows: the table that was taken.
        target: where its members go.
        members: rows of one evidence and hardware.
        alone: whether these are all rows; needed where companions do not name cells.
    """
    digests = {*members["config_sha256"]}
    texts: dict[Path, str] = {}
    for suffix in COMPANION_SUFFIXES:
        companion = _companion(rows, suffix)
        # Single steps of a race are twenty times as large as its rows, and no table or figure needs them.
        if not companion.exists() or tuple(header_of(companion)) == TABLES["peers-steps"].columns:
            continue
        own = _checked(companion)
        if tuple(own.columns) == CONFIGURATION_COLUMNS:
            own = own[own["config_sha256"].isin(digests)]
        elif "cell" in own:
            own = own[own["cell"].isin(members["cell"])]
        elif alone:
            digests |= {*own.get("config_sha256", ())}
        else:
            raise ConfigError([f"rows must be of one machine where {companion} names no cells, got several; part them"])
        if len(own):
            texts[_companion(target, suffix)] = csv_text(list(own.columns), own)
    return texts


def _checked(path: Path) -> pd.DataFrame:
    """The texts of a table whose values keep the limits of their columns, each line once."""
    table = read_text(path)
    kind = table_of(list(table.columns), path)
    read_table(path, kind.columns, kind=kind.name, empty=True)
    return table


def _companion(rows: Path, suffix: str) -> Path:
    return rows.with_name(f"{rows.stem}{suffix}.csv")


def place_name(text: str, rows: Path) -> str:
    """The name of a folder for hardware: small letters, digits and single dashes.

    Raises:
        ConfigError: nothing is left of ``text``.
    """
    name = readable(text)
    if not name:
        raise ConfigError(
            [f"rows must name their hardware in the column profile, got {text!r} in {rows}; pass --machine NAME"]
        )
    return name
