"""Files that are whole or absent: everything is written beside its place first and moved there when it is complete.

A process that is killed in between leaves what it was writing, under a name that says whose it is. The next one that
writes in that folder removes it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from gpipe_bench.errors import OutputError

__all__ = ["check_writable", "json_text", "staging", "write_files"]


_PREFIX: Final = ".writing-"


def check_writable(path: Path) -> None:
    """Make sure, before hours of work, that ``path`` can be written; leaves no file.

    Raises:
        OutputError: it is a folder, or its folder cannot be made or written.
    """
    if path.is_dir():
        raise OutputError(f"output must be a file, got the folder {path}; name a file in it")
    with staging(path.parent) as folder:
        (folder / path.name).touch()


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A temporary folder inside ``target``, on the same file system, whose files can be moved into place by a rename.

    Raises:
        OutputError: ``target`` cannot be made or written.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=target, prefix=_prefix(target))
    except OSError as error:
        raise _refusal(target, error) from error
    with folder:
        yield Path(folder.name)


def write_files(texts: Mapping[Path, str]) -> None:
    """Write all of ``texts``, in UTF-8; when one cannot be written, none is replaced.

    Raises:
        OutputError: a path cannot be written.
    """
    moves: list[tuple[Path, Path]] = []
    try:
        for path, text in texts.items():
            if path.is_dir():
                raise OutputError(f"output must be a file, got the folder {path}; name a file in it")
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path.parent))
            moves.append((Path(name), path))
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            # mkstemp makes files that only their owner can read; results are for everybody whom the umask allows.
            Path(name).chmod(0o666 & ~_umask())
        for temporary, path in moves:
            temporary.replace(path)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise _refusal(path, error) from error
    finally:
        for temporary, _ in moves:
            temporary.unlink(missing_ok=True)


def json_text(data: Any) -> str:
    """``data`` as strict JSON with a line end; NaN is refused, since no reader agrees on it."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def _prefix(folder: Path) -> str:
    """How names of unfinished files of this process begin, once those of processes that are no more are removed.

    Other machines may write to the same folder, so theirs stay.
    """
    machine = f"{_PREFIX}{socket.gethostname()}."
    for left in folder.glob(f"{_PREFIX}*"):
        process = left.name.removeprefix(machine).partition("-")[0]
        if left.name.startswith(machine) and process.isdigit() and _is_over(int(process)):
            with suppress(OSError):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return f"{machine}{os.getpid()}-"


def _is_over(process: int) -> bool:
    """Whether a process of this machine has ended; False where that cannot be told."""
    if os.name != "posix":
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _refusal(path: Path, error: OSError) -> OutputError:
    return OutputError(f"output must be writable, got {path} ({error.strerror or error}); choose another path")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
