"""Automatic balance: how many layers each partition takes, exactly optimal for the measured time, memory or simulation.

Importing this package is light: PyTorch is loaded when a name that needs it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_bench.balance.partition import split_min_max
from gpipe_bench.lazy import lazy

if TYPE_CHECKING:
    from gpipe_bench.balance.by_simulation import balance_by_simulation, layer_simulated_times
    from gpipe_bench.balance.by_size import balance_by_size, layer_sizes
    from gpipe_bench.balance.by_time import balance_by_time, layer_times

__all__ = [
    "balance_by_simulation",
    "balance_by_size",
    "balance_by_time",
    "layer_simulated_times",
    "layer_sizes",
    "layer_times",
    "split_min_max",
]

_LAZY = {
    "balance_by_simulation": "gpipe_bench.balance.by_simulation",
    "layer_simulated_times": "gpipe_bench.balance.by_simulation",
    "balance_by_size": "gpipe_bench.balance.by_size",
    "balance_by_time": "gpipe_bench.balance.by_time",
    "layer_sizes": "gpipe_bench.balance.by_size",
    "layer_times": "gpipe_bench.balance.by_time",
}

__getattr__, __dir__ = lazy(__name__, _LAZY, __all__)
