"""Skip connections: layers declare what they stash, pop and peek, and the engine transports it.

    from gpipe_bench.skip import skippable, stash, pop, peek

See :func:`skippable` for an example. The layers also run in a plain ``nn.Sequential``.
"""

from __future__ import annotations

from gpipe_bench.skip.layout import verify_skippables
from gpipe_bench.skip.namespace import Namespace
from gpipe_bench.skip.skippable import Skippable, isolate, peek, pop, skippable, stash

__all__ = [
    "Namespace",
    "Skippable",
    "isolate",
    "peek",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]
