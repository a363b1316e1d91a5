"""An attribute with another value for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["replaced"]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute of a module or class have another value in the block, for all threads."""
    plain = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, plain)
