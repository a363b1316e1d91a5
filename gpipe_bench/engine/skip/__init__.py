"""Skip connections: layers declare what they stash and pop, the engine decides how it travels."""

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
