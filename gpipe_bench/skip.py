"""Skip connections: a layer stashes a tensor, and a later layer, maybe on another device, pops it.

::

    from gpipe_bench.skip import pop, skippable, stash

:func:`skippable` shows two layers with a skip.
"""

from gpipe_bench.engine.skip import Namespace, Skippable, isolate, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "Skippable", "isolate", "pop", "skippable", "stash", "verify_skippables"]
