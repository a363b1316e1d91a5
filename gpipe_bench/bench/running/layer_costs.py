"""The balance of simulated cells that leave it to the simulator; times of layers are kept for cells that share them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from gpipe_bench.balance.by_simulation import layer_simulated_times
from gpipe_bench.balance.partition import split_min_max
from gpipe_bench.models.table import parse_arguments
from gpipe_bench.simulator.workloads.build import Model

if TYPE_CHECKING:
    from gpipe_bench.bench.spec.simulated_cells import SimulatedCell


def simulated_balance(cell: SimulatedCell) -> list[int]:
    """Layers per partition such that the slowest partition is as fast as it can be on the cell's profile.

    Raises:
        BalanceError: more partitions than layers.
        ConfigError: no such model or profile.
    """
    batch = cell.batch_size, cell.chunks
    times = _times(cell.model, cell.model_args, cell.profile, batch, cell.checkpoint, precision=cell.precision)
    return split_min_max(times, cell.partitions)


@lru_cache(maxsize=256)
def _times(
    model: str, model_args: str, profile: str, batch: tuple[int, int], checkpoint: str, *, precision: str = "float32"
) -> tuple[float, ...]:
    size, chunks = batch
    known = Model(model, parse_arguments(model, model_args))
    times = layer_simulated_times(
        known, profile=profile, batch_size=size, chunks=chunks, checkpoint=checkpoint, precision=precision
    )
    return tuple(times)
