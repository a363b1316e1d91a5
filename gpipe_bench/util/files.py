"""Files that are whole or absent: each is written as a draft beside its place and moved there when it is complete.

A draft has a name of its own, so two processes that write the same file do not mix. A process that is killed leaves
its drafts; their names say whose they are, and the next writer in that folder removes them.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from gpipe_bench.errors import OutputError

DRAFT_PREFIX: Final = ".writing-"
"""How names of drafts begin."""

_OLD_S: Final = 24 * 3600.0


def check_writable(*paths: Path | None, inputs: Iterable[Path | str | None] = ()) -> None:
    """Make sure, before hours of work, that ``paths`` can be written; leaves no file.

    Args:
        paths: files to write; None for those that nobody asked for.
        inputs: files that are read; None, and names that are no files, are left out.

    Raises:
        OutputError: a path is a folder, or its folder cannot be made or written, or it is that of an input or of
            another output.
    """
    taken = {os.path.realpath(one) for one in inputs if one is not None and is_file(Path(one))}
    for path in filter(None, paths):
        try:
            _check_file(path)
            with staging(path.parent) as folder:
                (folder / path.name).touch()
        except OSError as error:
            raise _refusal(path, error) from error
        place = os.path.realpath(path)
        if place in taken:
            rule = "output must be another file than inputs and other outputs"
            raise OutputError(f"{rule}, got {path} for both; choose another path")
        taken.add(place)


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


def write_files(contents: Mapping[Path, str | bytes]) -> None:
    """Write all of ``contents``, text in UTF-8; when one cannot be written, none is replaced.

    Text is compressed where the name of its file ends in ``.gz``.

    Raises:
        OutputError: a path cannot be written.
    """
    moves: list[tuple[Path, Path]] = []
    try:
        for path, content in contents.items():
            _check_file(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            # mkstemp takes a name that is free and follows no link.
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path.parent))
            moves.append((Path(name), path))
            with os.fdopen(handle, "wb") as file:
                raw = content if isinstance(content, bytes) else content.encode()
                # Without a time, so that the same text gives the same file.
                file.write(gzip.compress(raw, mtime=0) if path.suffix == ".gz" and raw is not content else raw)
            # mkstemp makes files that only their owner can read; results are for everybody whom the umask allows.
            Path(name).chmod(0o666 & ~_umask())
        for draft, path in moves:
            draft.replace(path)
    except OSError as error:
        raise _refusal(path, error) from error
    finally:
        for draft, _ in moves:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def is_file(path: Path) -> bool:
    """Whether there is such a file; a name that no file can have, such as one of 300 letters, is none."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """The same of a folder."""
    try:
        return path.is_dir()
    except OSError:
        return False


def json_text(data: Any) -> str:
    """``data`` as strict JSON with a line end; NaN is refused, since no reader agrees on it."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise OutputError(f"output must be a file, got the folder {path}; name a file in it")


def _prefix(folder: Path) -> str:
    """How names of drafts of this process begin, once those that nobody writes any more are removed.

    Other machines may write to the same folder, so their drafts stay for a day.
    """
    machine = f"{DRAFT_PREFIX}{socket.gethostname()}."
    for left in folder.glob(f"{DRAFT_PREFIX}*"):
        process = left.name.removeprefix(machine).partition("-")[0]
        ended = left.name.startswith(machine) and process.isdecimal() and _is_over(int(process))
        with suppress(OSError):
            if ended or time.time() - left.lstat().st_mtime > _OLD_S:
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    return f"{machine}{os.getpid()}-"


def _is_over(process: int) -> bool:
    """Whether a process of this machine has ended; False where that cannot be told."""
    if os.name != "posix":
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _refusal(path: Path, error: OSError) -> OutputError:
    if isinstance(error, OutputError):
        return error
    return OutputError(f"output must be writable, got {path} ({error.strerror or error}); choose another path")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
