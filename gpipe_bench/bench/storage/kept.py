"""Finished parts of a job, on disk as soon as they are there: a job that is cut off goes on where it was.

They lie in a file beside the result, which Snakemake knows nothing of and so does not remove: the key of the job, then
a line per part, each JSON behind a digest of it. The file is gone when the result is written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gpipe_bench.errors import OutputError
from gpipe_bench.util.files import write_files
from gpipe_bench.util.sealed import seal, unseal


class KeptParts:
    """Finished parts of one result; a file with another key, or of another kind, is not used.

    Args:
        path: the file; :meth:`beside` has a name for it.
        key: what must agree for parts to belong to one job, such as sources and packages, as JSON.
    """

    def __init__(self, path: Path, key: Any) -> None:
        self._path = path
        head, *lines = _lines(path) or [{}]
        self.found = head == {"key": key}
        """Whether parts of this job were there."""
        own = [line for line in lines if self.found and set(line) == {"name", "part"}]
        self._parts: dict[str, Any] = {line["name"]: line["part"] for line in own}
        self._text = "".join(_line(line) for line in ({"key": key}, *own))

    @classmethod
    def beside(cls, result: Path, key: Any) -> KeptParts:
        """The parts of ``result``, in a hidden file beside it."""
        return cls(result.with_name(f".{result.name}.kept"), key)

    def __len__(self) -> int:
        return len(self._parts)

    def get(self, name: str) -> Any:
        """The part with this name; None if there is none. A name must identify everything that determines the part."""
        return self._parts.get(name)

    def add(self, name: str, part: Any) -> None:
        """Keep a finished part, as JSON.

        Raises:
            OutputError: it cannot be written.
        """
        self._parts[name] = part
        line = _line({"name": name, "part": part})
        if self._text:
            # Without what is not ours, and a line that was cut short, onto which this one would be written.
            write_files({self._path: self._text + line})
            self._text = ""
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            rule = f"finished parts must be kept in a file that can be written, got {self._path}"
            raise OutputError(f"{rule} ({error.strerror or error}); make room, or name another --out") from error

    def remove(self) -> None:
        """Forget all: the result is written."""
        self._path.unlink(missing_ok=True)


def _line(record: dict[str, Any]) -> str:
    return seal(json.dumps(record)) + "\n"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The records up to the first that is not whole: the job was killed while it wrote, or the file was damaged."""
    found: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return found
    for line in text.splitlines(keepends=True):
        record = unseal(line.removesuffix("\n")) if line.endswith("\n") else None
        if record is None:
            break
        found.append(json.loads(record))
    return found
