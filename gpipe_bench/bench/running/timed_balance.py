"""The balance of measured cells that leave it to this machine: its layers are timed once, and the times are kept."""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn

from gpipe_bench.balance.by_time import balance_by_time
from gpipe_bench.balance.kept import default_folder
from gpipe_bench.bench.spec.cells import Cell
from gpipe_bench.models.table import model_digest

_SECONDS: Final = 2.0


def timed_balance(cell: Cell, model: nn.Sequential, batch: Tensor) -> list[int]:
    """Layers per partition such that the slowest partition is as fast as it can be on the first device of ``cell``.

    Cells of one model and micro-batch share the times, so that they are cut alike.

    Args:
        cell: what is cut.
        model: its layers.
        batch: its inputs, whose first micro-batch is timed.

    Raises:
        BalanceError: more partitions than layers.
    """
    if cell.partitions == 1:
        return [len(model)]
    # Files of a model of one's own that its layers do not show may decide what they cost.
    cache = None if model_digest(cell.model) else default_folder()
    part = batch.chunk(cell.chunks)[0]
    return balance_by_time(cell.partitions, model, part, timeout=_SECONDS, device=cell.places()[0], cache=cache)
