"""Skip connections, under their stable name: ``from gpipe_bench.skip import skippable, stash, pop``."""

from gpipe_bench.engine.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"]
