"""The user's cache: what takes long to make is kept there, and is made anew where it is missing or damaged."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Final

_CHECKOUT: Final = Path(__file__).resolve().parents[2]
_DIGITS: Final = 32
"""Of the digest that a file begins with: damage on disk is found before use, down to one changed bit."""


def cache_folder(part: str) -> Path:
    """The folder of a part of the cache, which need not exist.

    ``$XDG_CACHE_HOME/gpipe_bench/PART``, by default below ``~/.cache``. Where the home cannot be written, ``.cache`` in
    the checkout takes its place.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path("~/.cache").expanduser()) / "gpipe_bench" / part
    return folder if base or _can_be_made(folder) else _CHECKOUT / ".cache" / "gpipe_bench" / part


def _can_be_made(folder: Path) -> bool:
    above = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110 - Path.exists raises below a folder of others
    return above.is_dir() and os.access(above, os.W_OK | os.X_OK)


def write_sealed(path: Path, content: bytes) -> None:
    """Write bytes for :func:`read_sealed`.

    Raises:
        OutputError: they cannot be written.
    """
    # Here and not above: what only reads starts sooner.
    from gpipe_bench.util.files import write_files

    write_files({path: _digest(content).encode() + content})


def read_sealed(path: Path) -> bytes | None:
    """The bytes that :func:`write_sealed` wrote; None if there are none, or they are damaged, which is said."""
    try:
        sealed = path.read_bytes()
    except OSError:
        return None
    content = sealed[_DIGITS:]
    if sealed[:_DIGITS] != _digest(content).encode():
        print(f"note: {path} is damaged or of another version, and is made anew", file=sys.stderr)
        return None
    return content


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
