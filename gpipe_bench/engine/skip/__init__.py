"""Skip connections: layers declare the skips that they stash and pop, and the engine transports them."""

from gpipe_bench.engine.skip.layout import SkipLayout, inspect_skip_layout, verify_skippables
from gpipe_bench.engine.skip.namespace import Namespace
from gpipe_bench.engine.skip.skippable import Skippable, isolate, pop, skippable, stash

__all__ = [
    "Namespace",
    "SkipLayout",
    "Skippable",
    "inspect_skip_layout",
    "isolate",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]
