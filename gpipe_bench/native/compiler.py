"""The C compiler: ``$CC``, else ``cc``, else the one in the wheel ``ziglang``; and that for C++: ``$CXX``, else any."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gpipe_bench.errors import CompilerError


def find_compiler() -> list[str] | None:
    """The command of this machine's C compiler, its path first; None if there is none, an error if CC is wrong."""
    named = words("CC")
    program, *options = named or ["cc"]
    if path := shutil.which(program):
        return [path, *options]
    if named:
        raise CompilerError(f"CC must name a program in PATH, got {program}; correct or unset CC")
    wheel = find_spec("ziglang")
    if wheel is None or wheel.origin is None:
        return None
    # The program behind `python -m ziglang`. By itself it compiles for the processor at hand, and for no older one.
    return [str(Path(wheel.origin).with_name("zig")), "cc", "-mcpu=baseline"]


def find_cxx_compiler() -> list[str] | None:
    """The command of this machine's C++ compiler; None if there is none, or none of the name in CXX.

    That of ``ziglang`` has a C++ library of its own, which does not fit PyTorch's.
    """
    for program, *options in [words("CXX")] if words("CXX") else [["c++"], ["g++"], ["clang++"]]:
        if path := shutil.which(program):
            return [path, *options]
    return None


def identity(command: Sequence[str]) -> str:
    """What changes with a compiler's version and options, found without starting it: that takes longer than loading."""
    program = Path(command[0]).resolve()
    return " ".join((program.name, str(program.stat().st_size), *command[1:]))


def words(variable: str) -> list[str]:
    """The words of a variable of the environment, by the rules of a shell; none if it is not set."""
    text = os.environ.get(variable, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise CompilerError(f"{variable} must be words of a shell, got {text!r} ({error}); correct it") from error
