"""Skip connections, under their stable name: ``from gpipe_bench.skip import skippable, stash, pop``."""

from gpipe_bench.engine.skip import Namespace, Skippable, isolate, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "Skippable", "isolate", "pop", "skippable", "stash", "verify_skippables"]
