"""The raw result of one run: what a fresh process leaves behind, before anything is averaged or joined.

{"cell": id, "row": {...}, "devices": [one per partition], "steps": [one per timed step], "events": [of one step],
 "configuration": "{...}"}

Repeats of a cell, and simulations, which share one process, leave a list of those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.results.rows import Row
from gpipe_bench.results.schema import TABLES
from gpipe_bench.suite.cells import Cell
from gpipe_bench.util.files import json_text

_OF_RUN: Final = ("cell", "variant", "repeat")
DEVICE_COLUMNS: Final = tuple(name for name in TABLES["devices"].columns if name not in _OF_RUN)
"""Figures of one partition. Peaks of a device that several partitions share stand with the first of them."""

PEAKS: Final = ("peak_allocated_gib", "peak_reserved_gib")
SHARES: Final = tuple(name for name in DEVICE_COLUMNS if name.endswith("_fraction"))
STEP_COLUMNS: Final = tuple(name for name in TABLES["steps"].columns if name not in _OF_RUN)


@dataclass(frozen=True, slots=True)
class RawResult:
    """One run of one cell.

    Attributes:
        cell: id of the cell.
        row: its row.
        devices: a record of :data:`DEVICE_COLUMNS` for each partition.
        steps: a record of :data:`STEP_COLUMNS` for each timed step.
        events: timeline events of one untimed step.
        configuration: what the row's ``config_sha256`` is the digest of; see :mod:`gpipe_bench.results.configurations`.
        bound_by_host: whether its devices wait for the host; measured ones do not know.
        caveats: what makes its numbers less certain than others; likewise.
        needed_gib: what the device needs that is out of memory; only simulations know.
    """

    cell: str
    row: Row
    devices: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    configuration: str = ""
    bound_by_host: bool = False
    caveats: list[str] = field(default_factory=list)
    needed_gib: float | None = None

    def to_json(self) -> str:
        """The text of the file."""
        return json_text(self.record())

    def record(self) -> dict[str, Any]:
        """What the file holds of it: one of these, or a list of them."""
        return {name: getattr(self, name) for name in self.__slots__} | {"row": asdict(self.row)}

    @classmethod
    def read(cls, path: Path) -> RawResult:
        """The result in a file that :meth:`to_json` made.

        Raises:
            ConfigError: the file cannot be read or is no raw result.
        """
        results = read_results(path)
        if len(results) != 1:
            raise ConfigError([f"raw result must be a file with one result, got {len(results)} in {path}; collect it"])
        return results[0]


def results_json(results: Iterable[RawResult]) -> str:
    """The text of a file with several results."""
    return json_text([result.record() for result in results])


def read_results(path: Path) -> list[RawResult]:
    """The results in a file, one or several.

    Raises:
        ConfigError: the file cannot be read or holds no raw results.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        records = data if isinstance(data, list) else [data]
        return [result_of(record) for record in records]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        rule = f"raw result must be a file that run wrote, got {path} ({reason})"
        raise ConfigError([f"{rule}; delete it, then run it again"]) from error


def result_of(record: dict[str, Any]) -> RawResult:
    """The result that a record of such a file holds.

    Raises:
        ValueError, TypeError, KeyError: it holds none.
    """
    result = RawResult(**{**record, "row": Row.from_dict(record["row"])})
    if not isinstance(result.cell, str) or not isinstance(result.configuration, str):
        raise TypeError("cell and configuration must be text")
    for name in ("devices", "steps", "events"):
        records = getattr(result, name)
        if not isinstance(records, list) or not all(isinstance(one, dict) for one in records):
            raise TypeError(f"{name} must be a list of records")
    return result


def cell_row(cell: Cell, repeat: int, **values: Any) -> Row:
    """The row of ``cell`` with what its settings say, and ``values`` for the rest."""
    return Row(**{**cell.columns(), "repeat": repeat, **values})
