"""Training steps on hardware that you do not have: the engine's schedule, simulated on a model of the hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_bench.util.lazy import lazy

if TYPE_CHECKING:
    from gpipe_bench.simulator.api import simulate
    from gpipe_bench.simulator.clock.simulation import DeviceUse, Simulation
    from gpipe_bench.simulator.workloads.build import Model

__all__ = ["DeviceUse", "Model", "Simulation", "simulate"]

# Loaded when first used: the simulator needs PyTorch, and its parts import each other.
_LAZY = {
    "DeviceUse": "gpipe_bench.simulator.clock.simulation",
    "Model": "gpipe_bench.simulator.workloads.build",
    "Simulation": "gpipe_bench.simulator.clock.simulation",
    "simulate": "gpipe_bench.simulator.api",
}

__getattr__, __dir__ = lazy(__name__, _LAZY, __all__)
