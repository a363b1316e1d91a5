"""Virtual time: the engine's own schedule on machines that are not there."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
