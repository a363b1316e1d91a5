"""The cycle collector at rest."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collection"]


@contextmanager
def no_collection() -> Iterator[None]:
    """Let the cycle collector rest in the block.

    Storages then die by their reference counts only, at the same step in every run; and a simulation keeps its many
    objects until it ends, which the collector would search again and again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
