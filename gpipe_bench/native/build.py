"""One library of C files: compiled into the user's cache unless it is there, and loaded.

The name of its file has two digests: one of the sources, what they include, the flags and the platform, and one of
the compiler. A library made from other files is never loaded. If the compiler was removed, its library still loads.

A wheel for one platform has the libraries of this package, and needs no compiler: see :func:`shipped`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from gpipe_bench.errors import CompilerError, OutputError
from gpipe_bench.native.compiler import find_compiler, identity, words
from gpipe_bench.util.cache import cache_folder

LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {
    "machine": ("machine", "simulator/memory"),
}
"""Name of a library of this package -> its folders below ``gpipe_bench``; it has all C files in them."""

EXTRA_FLAGS: Final = "GPIPE_BENCH_CFLAGS"
"""Variable of the environment with more flags for the compiler, such as ``-g -fsanitize=address``."""

# A fused multiply-add rounds once where Python rounds twice: results must not depend on the processor.
_FLAGS: Final = ("-O3", "-std=c11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-semantic-interposition")
# Functions are inlined across files. Some installations of clang have no linker that can.
_WHOLE: Final = "-flto"
_PACKAGE: Final = Path(__file__).resolve().parents[1]


@cache
def packaged(name: str) -> ctypes.CDLL:
    """A library of :data:`LIBRARIES`, once per process: the wheel's, or one that is compiled.

    Raises:
        CompilerError: there is no compiler, or it failed, or the library does not load.
        OutputError: the user's cache cannot be written.
    """
    path = shipped(name, _PACKAGE)
    if path.exists() and not words(EXTRA_FLAGS):
        # A library for another platform does not load.
        with suppress(OSError):
            return ctypes.CDLL(str(path))
    return library(name, sources_of(name, _PACKAGE))


def shipped(name: str, package: Path) -> Path:
    """Where a wheel for one platform has a library of :data:`LIBRARIES`, which need not exist.

    Args:
        name: of the library.
        package: the folder of this package, or of a copy of it.
    """
    # With a digest: when sources are edited later, they are compiled.
    return package / "native" / f"{name}-{digest(_texts(sources_of(name, package)))}.so"


def sources_of(name: str, package: Path) -> list[Path]:
    """The C files of a library of :data:`LIBRARIES`."""
    return [path for part in LIBRARIES[name] for path in sorted((package / part).glob("*.c"))]


def library(name: str, sources: Sequence[Path]) -> ctypes.CDLL:
    """The library of C files, compiled now unless it is in the user's cache.

    Args:
        name: begins the name of the library's file.
        sources: the C files. What they include stands in their folders: any file there but Python's and YAML's counts.

    Raises:
        CompilerError: there is no compiler, or it failed, or the library does not load.
        OutputError: the user's cache cannot be written.
    """
    # A file in the cache may be damaged: then it is compiled once more.
    for again in (False, True):
        path = _compiled(name, sources, again=again)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            problem = error
    rule = f"library must load, got {path} ({problem}); delete it, or set XDG_CACHE_HOME to another folder"
    raise CompilerError(rule) from problem


def _compiled(name: str, sources: Sequence[Path], *, again: bool) -> Path:
    folder, flags = cache_folder("native"), [*_FLAGS, *words(EXTRA_FLAGS)]
    # A library linked with a newer C library does not load with an older one, and machines may share a home folder.
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    made_for = " ".join((os.uname().sysname, os.uname().machine, libc or "", *flags, _WHOLE))
    start = f"{name}-{digest([made_for.encode(), *_texts(sources)])}"
    compiler = find_compiler()
    if compiler is not None:
        path = folder / f"{start}-{digest([identity(compiler).encode()])}.so"
        if again or not path.exists():
            compile_c(path, compiler, sources)
        return path
    if left := sorted(folder.glob(f"{start}-*.so")):
        return left[0]
    raise CompilerError(
        "a C compiler must be in PATH, got none; install gcc or clang, or run: python -m pip install ziglang"
    )


def compile_c(path: Path, compiler: Sequence[str], sources: Sequence[Path]) -> None:
    """Compile C files into the library ``path``; raises what :func:`compile_into` raises."""
    command = [*compiler, *_FLAGS, *words(EXTRA_FLAGS), *map(str, sources), "-lm"]
    try:
        compile_into(path, [*command, _WHOLE], "CC")
    except CompilerError:
        compile_into(path, command, "CC")


def _texts(sources: Sequence[Path]) -> Iterator[bytes]:
    """The files that a library is made from, with their names."""
    beside = {path for folder in {source.parent for source in sources} for path in folder.iterdir()}
    included = sorted(path for path in beside if path.suffix not in (".c", ".py", ".yaml") and path.is_file())
    for path in (*sources, *included):
        yield f"{path.parent.name}/{path.name}".encode()
        yield path.read_bytes()


def digest(parts: Iterable[bytes]) -> str:
    """What tells files apart by all that they are made from."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()[:20]


def compile_into(path: Path, command: Sequence[str], variable: str) -> None:
    """Compile into ``path``, which is whole or absent at any time.

    Args:
        path: of the library.
        command: of the compiler, but for its output.
        variable: of the environment that names another compiler.

    Raises:
        CompilerError: the compiler failed.
        OutputError: the folder cannot be written.
    """
    # Here and not above: what is in the cache is loaded sooner without.
    from gpipe_bench.util.files import staging

    try:
        with staging(path.parent) as draft:
            _run([*command, "-o", str(draft / path.name)], draft, variable)
            (draft / path.name).replace(path)
    except OutputError as error:
        raise OutputError(
            f"cache must be writable, got {path.parent} ({error.__cause__}); set XDG_CACHE_HOME to another folder"
        ) from error


def _run(command: Sequence[str], draft: Path, variable: str) -> None:
    import subprocess

    # What zig compiles on the way is needed once.
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(draft), "ZIG_LOCAL_CACHE_DIR": str(draft)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if status := done.returncode:
        said = "\n".join((done.stderr + done.stdout).splitlines()[:12])
        raise CompilerError(
            f"{'C' if variable == 'CC' else 'C++'} code must compile with {command[0]}, got exit status {status}; name "
            f"another compiler in {variable}\n{said}"
        )
