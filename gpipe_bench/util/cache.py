"""The user's cache: what takes long to make is kept there, and is made anew where it is missing."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(part: str) -> Path:
    """``$XDG_CACHE_HOME/gpipe_bench/PART``, by default below ``~/.cache``; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpipe_bench" / part
