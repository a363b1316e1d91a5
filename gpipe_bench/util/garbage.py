"""Switches Python's garbage collector off, for a while or for good."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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


def retire_collection() -> None:
    """Before a process ends: what it has made is searched for cycles no more.

    The interpreter searches everything several times while it ends, which takes seconds after a model was traced.
    """
    gc.freeze()
