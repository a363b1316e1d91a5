"""How virtual devices that compute behave in tests: how long kernels take, and in which order host threads run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpipe_bench.emulator.library import backend

__all__ = ["duration", "jitter"]


@contextmanager
def duration(milliseconds: float) -> Iterator[None]:
    """Let each kernel that this thread launches in the block take so much virtual time."""
    before = backend().vd_set_duration(round(milliseconds * 1e6))
    try:
        yield
    finally:
        backend().vd_set_duration(before)


@contextmanager
def jitter(seed: int, microseconds: int) -> Iterator[None]:
    """Let the host wait at random, up to ``microseconds``, before each launch: shakes the order of its threads."""
    backend().vd_set_jitter(seed, microseconds)
    try:
        yield
    finally:
        backend().vd_set_jitter(0, 0)
