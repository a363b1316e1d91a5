"""The balance of simulated cells that leave it to the simulator; times of layers are kept for cells that share them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from gpipe_bench.balance.by_simulation import layer_simulated_times
from gpipe_bench.balance.partition import split_min_max
from gpipe_bench.models.table import parse_arguments
from gpipe_bench.simulator.hardware.profile import load_profile
from gpipe_bench.simulator.workloads.build import Model

if TYPE_CHECKING:
    from gpipe_bench.bench.spec.simulated_cells import SimulatedCell


def simulated_balance(cell: SimulatedCell) -> list[int]:
    """Layers per partition such that the slowest partition is as fast as it can be on the cell's profile.

    Raises:
        BalanceError: more partitions than layers.
        ConfigError: no such model or profile.
    """
    network, hardware = (cell.model, cell.model_args), (cell.profile, cell.tf32)
    times = _times(network, hardware, (cell.batch_size, cell.chunks), cell.checkpoint, precision=cell.precision)
    return split_min_max(times, cell.partitions)


@lru_cache(maxsize=256)
def _times(
    network: tuple[str, str],
    hardware: tuple[str, bool | None],
    batch: tuple[int, int],
    checkpoint: str,
    *,
    precision: str,
) -> tuple[float, ...]:
    (model, model_args), (profile, tf32), (size, chunks) = network, hardware, batch
    known, devices = Model(model, parse_arguments(model, model_args)), load_profile(profile).with_tf32(tf32)
    times = layer_simulated_times(
        known, profile=devices, batch_size=size, chunks=chunks, checkpoint=checkpoint, precision=precision
    )
    return tuple(times)
