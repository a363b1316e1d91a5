"""Compile the C code of the package with the address and undefined-behaviour sanitizers, and run the tests that use it.

    python -m scripts.check_native                              all of TESTS
    python -m scripts.check_native tests/native -k once         these arguments of pytest in their place

The libraries go to a cache of their own, which is removed. Warnings are errors here, and only here: a compiler that is
newer than this code must not stop a user. Without a compiler that has the sanitizers as shared libraries, as gcc has
on Linux, nothing runs, and a line says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpipe_bench.native.build import EXTRA_FLAGS
from gpipe_bench.native.compiler import find_compiler

ROOT: Final = Path(__file__).resolve().parent.parent
TESTS: Final = (
    "tests/emulator/test_replay.py",
    "tests/emulator/test_replay_memory.py",
    "tests/emulator/test_replay_threads.py",
    "tests/native/test_library.py",
    "tests/simulator/test_allocator.py",
    "tests/simulator/test_blocks.py",
    "tests/simulator/test_cells.py",
    "tests/simulator/test_flavours.py",
    "tests/simulator/test_lives.py",
    "tests/simulator/test_makespan.py",
    "tests/simulator/test_schedules.py",
)
COMPILE: Final = "from gpipe_bench.native.build import LIBRARIES, packaged; [packaged(name) for name in LIBRARIES]"
FLAGS: Final = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -Wall -Wextra -Werror"


def environment(cache: Path) -> dict[str, str] | None:
    """The environment of a Python that loads libraries with the sanitizers; None where there are none.

    Args:
        cache: folder for the libraries.
    """
    # Python has no sanitizer in it, so theirs must be loaded first; libstdc++ before PyTorch throws an exception.
    preloaded = [_library("libasan.so"), _library("libstdc++.so.6")]
    if None in preloaded:
        return None
    return {
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        EXTRA_FLAGS: FLAGS,
        "LD_PRELOAD": ":".join(filter(None, preloaded)),
        # Python itself leaves memory behind when it ends. After an abort pytest shows the lines of Python, too.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:abort_on_error=1",
        # Each buffer that Python hands over is an allocation of its own, so that reading past its end is seen.
        "PYTHONMALLOC": "malloc",
    }


def _library(name: str) -> str | None:
    command = find_compiler()
    if command is None:
        return None
    asked = subprocess.run([*command, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
    path = Path(asked.stdout.strip())
    # A compiler that does not have it gives the name back.
    return str(path) if path.is_absolute() and path.exists() else None


def main(arguments: Sequence[str]) -> int:
    """Run the tests; gives pytest's exit status, and 0 where there are no sanitizers."""
    with tempfile.TemporaryDirectory() as cache:
        given = environment(Path(cache))
        if given is None:
            print("skipped: no C compiler here has the sanitizers as shared libraries; gcc on Linux has")
            return 0
        # Otherwise each test would compile, and fail, again.
        compiled = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, env=given, check=False).returncode
        if compiled:
            return compiled
        # What the sanitizers write would be lost with a captured stderr.
        options = ["-q", "--capture=sys", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, *(arguments or TESTS)]
        return subprocess.run(command, cwd=ROOT, env=given, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
