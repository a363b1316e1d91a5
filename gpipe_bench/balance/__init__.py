"""Automatic balance: how many consecutive layers each partition takes.

balance_by_time          the slowest partition is as fast as it can be; times the layers on this machine
balance_by_size          the largest partition is as small as it can be; counts bytes, on any device
balance_by_simulation    the busiest device is as little busy as it can be; for hardware that you do not have

Each function is the optimum of :func:`split_min_max` for the costs of ``layer_times``, ``layer_sizes`` or
``layer_simulated_times``. Importing this package does not load PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_bench.balance.partition import split_min_max
from gpipe_bench.util.lazy import lazy

if TYPE_CHECKING:
    from gpipe_bench.balance.by_simulation import balance_by_simulation, layer_simulated_times
    from gpipe_bench.balance.by_size import balance_by_size, layer_sizes
    from gpipe_bench.balance.by_time import balance_by_time, layer_times, measure_layers

__all__ = [
    "balance_by_simulation",
    "balance_by_size",
    "balance_by_time",
    "layer_simulated_times",
    "layer_sizes",
    "layer_times",
    "measure_layers",
    "split_min_max",
]

_LAZY = {
    "balance_by_simulation": "gpipe_bench.balance.by_simulation",
    "layer_simulated_times": "gpipe_bench.balance.by_simulation",
    "balance_by_size": "gpipe_bench.balance.by_size",
    "balance_by_time": "gpipe_bench.balance.by_time",
    "layer_sizes": "gpipe_bench.balance.by_size",
    "layer_times": "gpipe_bench.balance.by_time",
    "measure_layers": "gpipe_bench.balance.by_time",
}

__getattr__, __dir__ = lazy(__name__, _LAZY, __all__)
