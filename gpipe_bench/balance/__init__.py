"""Automatic balance: how many layers each partition takes, by measured time or memory, exactly optimal for the measure.

Importing this package is light: PyTorch is loaded when a name that needs it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_bench.balance.partition import split_min_max
from gpipe_bench.lazy import lazy

if TYPE_CHECKING:
    from gpipe_bench.balance.by_size import balance_by_size, layer_sizes
    from gpipe_bench.balance.by_time import balance_by_time, layer_times

__all__ = ["balance_by_size", "balance_by_time", "layer_sizes", "layer_times", "split_min_max"]

_LAZY = {
    "balance_by_size": "gpipe_bench.balance.by_size",
    "balance_by_time": "gpipe_bench.balance.by_time",
    "layer_sizes": "gpipe_bench.balance.by_size",
    "layer_times": "gpipe_bench.balance.by_time",
}

__getattr__, __dir__ = lazy(__name__, _LAZY, __all__)
