"""gpipe_bench: a reproducible benchmark suite for pipeline-parallel training, around a reference engine in PyTorch.

Importing this package is light: PyTorch is loaded when a name that needs it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpipe_bench.components import Components
from gpipe_bench.errors import GpipeBenchError

if TYPE_CHECKING:
    from gpipe_bench.engine.checkpoint import is_checkpointing, is_recomputing
    from gpipe_bench.engine.gpipe import GPipe
    from gpipe_bench.engine.pipe import Pipe

__all__ = ["Components", "GPipe", "GpipeBenchError", "Pipe", "__version__", "is_checkpointing", "is_recomputing"]

__version__ = "0.1.0"

_LAZY = {
    "GPipe": "gpipe_bench.engine.gpipe",
    "Pipe": "gpipe_bench.engine.pipe",
    "is_checkpointing": "gpipe_bench.engine.checkpoint",
    "is_recomputing": "gpipe_bench.engine.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
