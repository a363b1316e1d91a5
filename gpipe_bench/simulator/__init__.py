"""Virtual time: the engine's own schedule on machines that are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_bench.lazy import lazy

if TYPE_CHECKING:
    from gpipe_bench.simulator.api import simulate
    from gpipe_bench.simulator.build import Model
    from gpipe_bench.simulator.simulation import DeviceUse, Simulation

__all__ = ["DeviceUse", "Model", "Simulation", "simulate"]

# Loaded when first used: the simulator needs PyTorch, and its parts import each other.
_LAZY = {
    "DeviceUse": "gpipe_bench.simulator.simulation",
    "Model": "gpipe_bench.simulator.build",
    "Simulation": "gpipe_bench.simulator.simulation",
    "simulate": "gpipe_bench.simulator.api",
}

__getattr__, __dir__ = lazy(__name__, _LAZY, __all__)
