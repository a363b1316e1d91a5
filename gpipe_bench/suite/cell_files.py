"""Files of cells: JSON with the settings of each cell by its name. A workflow hands its cells to commands so.

A table of rows has its cells in the configurations beside it. Those that were measured can be simulated and emulated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gpipe_bench.errors import ConfigError
from gpipe_bench.results.configurations import CONFIGURATION_COLUMNS, CONFIGURATIONS
from gpipe_bench.results.tables import plain_records, read_table
from gpipe_bench.suite.cells import MeasuredCell
from gpipe_bench.suite.emulated_cells import EmulatedCell
from gpipe_bench.suite.simulated_cells import SimulatedCell
from gpipe_bench.suite.validation import validated
from gpipe_bench.util.files import json_text
from gpipe_bench.util.nearest import nearest

Cell = MeasuredCell | SimulatedCell | EmulatedCell
CellT = TypeVar("CellT", MeasuredCell, SimulatedCell, EmulatedCell)


def cells_text(cells: Iterable[Cell]) -> str:
    """The text of a file with these cells, each by its key, none twice."""
    return json_text({cell.id: cell.model_dump(mode="json") for cell in cells})


def read_cells(
    path: Path, kind: type[CellT], names: Sequence[str] = (), profile: str = "", launch_us: float | None = None
) -> list[CellT]:
    """The cells of one kind in a file, one for each name there, in its order.

    Args:
        path: the file; or a table of rows with its configurations beside it, whose first eight digits name the cells.
        kind: what the cells must be.
        names: of the cells to take, in this order; empty: all of the kind.
        profile: hardware on which measured cells are simulated or emulated; empty: they are of another kind.
        launch_us: host time of an operation in cells that are simulated or emulated; None: as each cell says.

    Raises:
        ConfigError: the file cannot be read, or settings are wrong; carries all problems.
    """
    evidence = kind.model_fields["evidence"].default
    entries = _entries(path)
    if profile:
        entries = {name: _on_profile(entry, kind, profile) for name, entry in entries.items()}
    if launch_us is not None:
        entries = {name: {**entry, "launch_us": launch_us} for name, entry in entries.items()}
    cells: list[CellT] = []
    problems: list[str] = []
    for name in names or [key for key, entry in entries.items() if entry.get("evidence", evidence) == evidence]:
        if name not in entries:
            problems.append(f"--only must name a cell of {path}, got {name!r}; {nearest(name, entries)}")
            continue
        try:
            cells.append(validated(kind, entries[name], partial(_named, f"{path}: {name}")))
        except ConfigError as error:
            problems += error.problems
    if not cells and not problems:
        problems.append(f"file of cells must have {evidence} ones, got none in {path}; add some, or name a profile")
    if problems:
        raise ConfigError(problems)
    return cells


def _on_profile(entry: dict[str, Any], kind: type[Cell], profile: str) -> dict[str, Any]:
    """The cell that was measured, as one of another kind: the same pipeline, on as many devices."""
    if entry.get("evidence") != "measured":
        return entry
    # Where a kind has no precision, a half is an unknown setting.
    halved = ["precision"] if entry.get("precision", "float32") != "float32" else []
    same = {name: entry[name] for name in (*halved, "backward", *kind.model_fields) if name in entry}
    own = {"flavour": "current"} if "flavour" in kind.model_fields else {"steps": 2}
    return {**same, **own, "evidence": kind.model_fields["evidence"].default, "profile": profile}


def _named(entry: str, path: tuple[str, ...]) -> str:
    return ".".join((entry, *path))


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    if path.suffix == ".csv":
        beside = path.with_name(f"{path.stem}_{CONFIGURATIONS}.csv")
        table = beside if beside.is_file() else path
        lines = plain_records(read_table(table, CONFIGURATION_COLUMNS, kind="configurations"))
        known = {line["config_sha256"][:8]: json.loads(line["configuration"]) for line in lines}
        # A digest of the files of a model or a schedule is no setting of it.
        digests = ("model_files", "schedule_file")
        return {name: {key: entry[key] for key in entry if key not in digests} for name, entry in known.items()}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        rule = f"file of cells must be readable JSON, got {path}"
        raise ConfigError([f"{rule} ({error}); check it"]) from error
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        rule = "file of cells must have the settings of each cell by its name"
        raise ConfigError([f'{rule}, got something else in {path}; write {{"mine": {{"model": "unet"}}}}'])
    return entries
