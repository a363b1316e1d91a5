"""Training steps on hardware that you do not have: the engine's schedule, simulated on a model of the hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_bench.util.lazy import lazy

if TYPE_CHECKING:
    from gpipe_bench.models.measured import MeasuredLayer, read_layers, write_layers
    from gpipe_bench.simulator.api import simulate
    from gpipe_bench.step.request import Model
    from gpipe_bench.step.result import DeviceUse, Step

__all__ = ["DeviceUse", "MeasuredLayer", "Model", "Step", "read_layers", "simulate", "write_layers"]

# Loaded when first used: the simulator needs PyTorch, and its parts import each other.
_LAZY = {
    "DeviceUse": "gpipe_bench.step.result",
    "MeasuredLayer": "gpipe_bench.models.measured",
    "Model": "gpipe_bench.step.request",
    "read_layers": "gpipe_bench.models.measured",
    "write_layers": "gpipe_bench.models.measured",
    "Step": "gpipe_bench.step.result",
    "simulate": "gpipe_bench.simulator.api",
}

__getattr__, __dir__ = lazy(__name__, _LAZY, __all__)
