"""Compiling the backend, once per source, compiler and PyTorch: the result stays in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

__all__ = ["BuildError", "built", "obstacle"]

SOURCES = Path(__file__).parent / "csrc"
# PyTorch's headers warn; optimisation takes longer than it saves.
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w"]


class BuildError(RuntimeError):
    """The backend must compile; its message ends with what the compiler said."""


def obstacle() -> str | None:
    """Why virtual devices cannot be had here, or None."""
    if not sys.platform.startswith("linux"):
        return f"virtual devices are built for Linux, this is {sys.platform}"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return f"a process has one accelerator, and here is a real one: {accelerator}"
    if _compiler() is None:
        return "no C++ compiler in PATH (c++, g++ or clang++; or name one in CXX)"
    return None


def built() -> Path:
    """The shared library, compiled now unless that is done already (about 15 s).

    Raises:
        BuildError: the compiler failed.
    """
    compiler = _compiler()
    if compiler is None:
        raise BuildError("a C++ compiler must be in PATH, got none; install one, or name one in CXX")
    library = _cache() / f"virtual_devices-{_key(compiler)}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            run = subprocess.run([compiler, *_arguments(made)], capture_output=True, text=True, check=False)
            if run.returncode != 0:
                raise BuildError(f"virtual devices must compile with {compiler}, got\n{run.stderr[-4000:]}")
            made.replace(library)
    return library


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    candidates = [named] if named else ["c++", "g++", "clang++"]
    return next((path for path in map(shutil.which, candidates) if path), None)


def _arguments(target: Path) -> list[str]:
    libraries = library_paths()
    return [
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in include_paths()),
        str(SOURCES / "backend.cpp"),
        *(f"-L{path}" for path in libraries),
        *(f"-Wl,-rpath,{path}" for path in libraries),
        *("-lc10", "-ltorch", "-ltorch_cpu"),
        *("-o", str(target)),
    ]


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.blake2b(digest_size=10)
    for part in (torch.__version__, torch.__file__, version, *FLAGS):
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpipe_bench"
