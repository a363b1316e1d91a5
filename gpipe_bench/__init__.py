"""gpipe_bench: a reproducible benchmark suite for pipeline-parallel training, around a reference engine in PyTorch.

Importing this package is light: PyTorch is loaded when a name that needs it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_bench.components import Components
from gpipe_bench.errors import GpipeBenchError
from gpipe_bench.lazy import lazy

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

__getattr__, __dir__ = lazy(__name__, _LAZY, __all__)
