"""Compiling the backend, once per source, compiler and PyTorch: the result stays in the user's cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import torch

from gpipe_bench.errors import CompilerError, UnsupportedError
from gpipe_bench.native.build import compile_into, digest
from gpipe_bench.native.compiler import find_cxx_compiler, identity
from gpipe_bench.util.cache import cache_folder

_SOURCES: Final = Path(__file__).parent / "csrc"
_ROW: Final = Path(__file__).parents[1] / "machine/trace_row.h"
"""The interface between the devices, which write rows, and the machine, which reads them."""
# Where torch.utils.cpp_extension finds them, too, which writes about CUDA to stderr when it is imported.
_TORCH: Final = Path(torch.__file__).parent
# PyTorch's headers warn; more optimisation takes longer than it saves.
_FLAGS: Final = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")
_NO_COMPILER: Final = "a C++ compiler must be in PATH (c++, g++ or clang++; or name one in CXX), got none; install one"


def obstacle() -> str | None:
    """Why virtual devices cannot be had here, in one line; or None."""
    if not sys.platform.startswith("linux"):
        return f"virtual devices must be built for Linux, got {sys.platform}; use a machine with Linux"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != "virtual":
        return f"a process must have one accelerator, got a real one: {accelerator}; hide it from the process"
    return _NO_COMPILER if find_cxx_compiler() is None else None


def require_virtual_devices() -> None:
    """Hide real accelerators from this process, which has those of one kind alone.

    Raises:
        UnsupportedError: virtual devices cannot be had here.
    """
    if reason := obstacle():
        raise UnsupportedError(reason)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def built() -> Path:
    """The shared library, compiled now unless it is in the user's cache (about 25 s).

    Raises:
        CompilerError: there is no compiler, or it failed.
        OutputError: the user's cache cannot be written.
    """
    compiler = find_cxx_compiler()
    if compiler is None:
        raise CompilerError(_NO_COMPILER)
    sources = [path.name.encode() + b"\0" + path.read_bytes() for path in (*sorted(_SOURCES.iterdir()), _ROW)]
    made_from = (torch.__version__, torch.__file__, identity(compiler), *_FLAGS)
    path = cache_folder("native") / f"devices-{digest([*sources, *map(str.encode, made_from)])}.so"
    if not path.exists():
        compile_into(path, [*compiler, *_arguments()], "CXX")
    return path


def _arguments() -> list[str]:
    return [
        *_FLAGS,
        # Warnings name files as they lie in the package.
        f"-fmacro-prefix-map={_SOURCES.parent}/=",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{_TORCH / 'include'}",
        f"-I{_ROW.parent}",
        str(_SOURCES / "backend.cpp"),
        f"-L{_TORCH / 'lib'}",
        f"-Wl,-rpath,{_TORCH / 'lib'}",
        *("-lc10", "-ltorch", "-ltorch_cpu"),
    ]
