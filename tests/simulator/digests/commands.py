"""The runs behind the committed tables: commands of the package, while somebody watches their calls of ``run``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, Final

import gpipe_bench.simulator.api
import gpipe_bench.simulator.published.runs  # noqa: F401 - loaded before calls are watched
from gpipe_bench.bench.advice.advice import AdviceRequest, advise
from gpipe_bench.bench.experiments.config import SuiteConfig
from gpipe_bench.bench.published.simulations import simulate_table
from gpipe_bench.bench.running.simulated import simulate_cells
from gpipe_bench.errors import OutOfMemory
from gpipe_bench.simulator.clock.run import Settings, run
from gpipe_bench.simulator.predictions import TABLES, predictions
from tests.simulator.digests.cases import Case, Line, line_of
from tests.simulator.digests.digest import input_of

__all__ = ["COMMANDS", "SAMPLES", "Command", "lines_of"]

Command = Callable[[], object]
"""Calls ``run`` any number of times."""


def _cells(experiment: str, every: int = 1) -> None:
    simulate_cells(SuiteConfig().experiments()[experiment].simulations()[::every], timelines=(), facts={})


def _sweep(model: str, every: int = 1, most: int = 10**9) -> None:
    """The grid of the sweeps when their digests were stored."""
    sweep = SuiteConfig().sweep.simulated[model]
    grid = {"partitions": (1, 2, 4, 8, 16, 64), "chunks": (1, 2, 4, 8, 16, 32, 128)}
    cells = sweep.model_copy(update=grid).simulations()
    simulate_cells([cell for cell in cells if cell.partitions * cell.chunks <= most][::every], timelines=(), facts={})


def _predictions(tables: tuple[str, ...] = TABLES) -> None:
    list(predictions(tables))


def _tables() -> None:
    suite = SuiteConfig()
    for table in (*suite.speed.simulated_tables, *suite.memory.simulated_tables):
        simulate_table(table)


COMMANDS: Final[dict[str, Command]] = {
    "predictions": _predictions,
    "tables": _tables,
    "ablation": partial(_cells, "ablation"),
    "sweep-unet": partial(_sweep, "unet"),
    "sweep-vit": partial(_sweep, "vit"),
    "sweep-amoebanet-d": partial(_sweep, "amoebanet-d"),
    "advice": lambda: advise(AdviceRequest()),
}
"""The groups."""

SAMPLES: Final[dict[str, Command]] = {
    "predictions": partial(_predictions, ("resnet101-speed",)),
    "ablation": partial(_cells, "ablation", 9),
    "sweep-unet": partial(_sweep, "unet", 20, 64),
}
"""A few of the runs of some groups."""


def lines_of(command: Command) -> list[Line]:
    """The runs of a command, each once, by name."""
    found: dict[str, Line] = {}

    def see(workload: Any, machine: Any, settings: Settings, outcome: object) -> None:
        part = input_of(workload, machine, settings)
        name = f"{workload.n}x{workload.m} {settings.checkpoint} {settings.components.label} {part}"
        if name not in found:
            found[name] = line_of(Case(name, workload, machine, settings), outcome)

    with _watched(see):
        command()
    return [found[name] for name in sorted(found)]


@contextmanager
def _watched(see: Callable[[Any, Any, Settings, object], None]) -> Iterator[None]:
    """Have every call of ``run`` seen, whatever module makes it."""

    def watching(workload: Any, machine: Any, settings: Settings | None = None) -> Any:
        try:
            outcome = run(workload, machine, settings)
        except OutOfMemory as error:
            see(workload, machine, settings or Settings(), error)
            raise
        see(workload, machine, settings or Settings(), outcome)
        return outcome

    # Tests have the function by name as well, and this module does: they call it as it is.
    users: list[ModuleType] = [
        module
        for name, module in sys.modules.items()
        if name.startswith("gpipe_bench") and vars(module).get("run") is run
    ]
    for module in users:
        module.run = watching  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in users:
            module.run = run  # type: ignore[attr-defined]
