"""Finished parts of a job, on disk as soon as they are there: a job that is cut off goes on where it was.

They lie in a hidden file beside the result, which Snakemake knows nothing of and so does not remove. It is gone when
the result is written.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpipe_bench.bench.files import write_files

__all__ = ["KeptParts"]


class KeptParts:
    """Finished parts of one result.

    Args:
        result: the file that is to hold all of them.
        key: sources and packages; what was left under another key is not used.
    """

    def __init__(self, result: Path, key: str) -> None:
        self._path, self._key = result.with_name(f".{result.name}.kept"), key
        self._parts: dict[str, Any] = {}
        with suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads(self._path.read_text(encoding="utf-8"))
            if found["key"] == key:
                self._parts = dict(found["parts"])

    def get(self, name: str) -> Any:
        """What was added under a name, which says all that decides it; None if it is not there."""
        return self._parts.get(name)

    def add(self, name: str, part: Any) -> None:
        """Keep a finished part, as JSON.

        Raises:
            OutputError: it cannot be written.
        """
        self._parts[name] = part
        write_files({self._path: json.dumps({"key": self._key, "parts": self._parts})})

    def remove(self) -> None:
        """Forget all: the result is written."""
        self._path.unlink(missing_ok=True)
