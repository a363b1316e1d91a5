"""Simulations and emulations sorted into jobs: a process loads PyTorch and a model's traces once and runs many cells.

Cells are shared: what several experiments ask for is run once, in one job, and each experiment takes its cells
from there. A job is small enough that little is lost when it is interrupted, and its keys short enough for a shell.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from gpipe_bench.bench.spec.emulated_cells import EmulatedCell
from gpipe_bench.bench.spec.names import model_word, readable
from gpipe_bench.bench.spec.simulated_cells import SimulatedCell

SIMULATED_PATTERN: Final = "results/simulated/{group}.json"
"""Where the raw results of a job that simulates lie."""

EMULATED_PATTERN: Final = "results/emulated/{group}.json"
"""Where those of a job that emulates lie."""

GROUP_PATTERN: Final = r"[a-z0-9-]+"
"""Regular expression of every group's name."""

OWN: Final = ("partitions", "chunks", "batch_size", "checkpoint", "variant", "balance", "schedule")
"""Settings that cells of one job have of their own."""

_SMALL: Final = 32
_MOST: Final = 150

CellT = TypeVar("CellT", SimulatedCell, EmulatedCell)


@dataclass(slots=True)
class CellGroup(Generic[CellT]):
    """Cells that one process simulates or emulates.

    Attributes:
        id: name of the file of their results.
        cells: in the order in which they were asked for.
        timelines: ids of those whose timeline is kept.
    """

    id: str
    cells: list[CellT] = field(default_factory=list)
    timelines: set[str] = field(default_factory=set)

    @property
    def path(self) -> str:
        """Where the results lie, below the folder of the run."""
        pattern = EMULATED_PATTERN if isinstance(self.cells[0], EmulatedCell) else SIMULATED_PATTERN
        return pattern.format(group=self.id)

    @property
    def profile(self) -> str:
        """The file of its hardware profile."""
        return self.cells[0].profile_path

    @property
    def names(self) -> str:
        """The keys of its cells, joined by commas."""
        return ",".join(cell.id for cell in self.cells)

    @property
    def kept(self) -> str:
        """The keys of the cells whose timelines are kept, in their order, joined by commas; else ``none``."""
        return ",".join(cell.id for cell in self.cells if cell.id in self.timelines) or "none"


def group_cells(asked: Iterable[tuple[Sequence[CellT], bool]]) -> list[CellGroup[CellT]]:
    """The jobs that simulate or emulate all cells, none twice.

    Args:
        asked: for each experiment its cells, and whether it needs their timelines.
    """
    cells: dict[str, CellT] = {}
    timelines: set[str] = set()
    for wanted, timeline in asked:
        known = {cell.id: cell for cell in wanted}
        cells |= {name: cell for name, cell in known.items() if name not in cells}
        timelines |= set(known) if timeline else set()
    buckets: dict[str, list[CellT]] = {}
    for cell in cells.values():
        buckets.setdefault(_bucket(cell), []).append(cell)
    groups = []
    for name, members in buckets.items():
        parts = [members[start : start + _MOST] for start in range(0, len(members), _MOST)]
        for k, part in enumerate(parts):
            kept = {cell.id for cell in part} & timelines
            groups.append(CellGroup(f"{name}-{k}" if len(parts) > 1 else name, part, kept))
    return groups


def _bucket(cell: SimulatedCell | EmulatedCell) -> str:
    """The same for cells that share traces; pipelines of many partitions take long and are kept apart."""
    shared: Mapping[str, Any] = {name: value for name, value in cell.settings().items() if name not in OWN}
    digest = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:8]
    size = f"n{cell.partitions}" if cell.partitions > _SMALL else f"n1-{_SMALL}"
    return f"{model_word(cell.model)}-{readable(str(cell.profile))}-{size}-{digest}"
