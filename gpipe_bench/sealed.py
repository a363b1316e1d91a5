"""Text with a digest of itself: damage on disk is found before use, down to one changed digit.

Caches and finished parts of a job are stored like this. A damaged one is made anew.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any, Final

__all__ = ["read_sealed", "seal", "unseal", "write_sealed"]

_DIGITS: Final = 32


def seal(text: str) -> str:
    """The text behind its digest and a space."""
    return f"{_digest(text)} {text}"


def unseal(sealed: str) -> str | None:
    """The text that :func:`seal` was given; None if it or its digest has changed since."""
    digest, text = sealed[:_DIGITS], sealed[_DIGITS + 1 :]
    return text if sealed[_DIGITS : _DIGITS + 1] == " " and digest == _digest(text) else None


def write_sealed(path: Path, value: object) -> None:
    """Write a JSON value for :func:`read_sealed`.

    Raises:
        OutputError: it cannot be written.
    """
    # Here and not above: what only reads starts sooner.
    from gpipe_bench.files import write_files

    write_files({path: seal(json.dumps(value, separators=(",", ":")))})


def read_sealed(path: Path) -> Any:
    """The value that :func:`write_sealed` wrote; None if there is none, or it is damaged, which is said."""
    try:
        sealed = path.read_bytes()
    except OSError:
        return None
    text = unseal(sealed.decode("utf-8", "replace"))
    if text is None:
        print(f"note: {path} is damaged or of another version, and is made anew", file=sys.stderr)
        return None
    return json.loads(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
