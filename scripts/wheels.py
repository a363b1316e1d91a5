"""Build a wheel for each platform, with the C code of the package compiled: who installs one needs no compiler.

    python -m scripts.wheels [OUT]          OUT: dist; a minute; needs: pip install ziglang

The wheel ``ziglang`` has a compiler for all platforms.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copytree
from typing import Final

from gpipe_bench.native.build import LIBRARIES, compile_c, shipped, sources_of

ROOT: Final = Path(__file__).resolve().parent.parent
TARGETS: Final[Mapping[str, str]] = {
    "manylinux_2_17_x86_64": "x86_64-linux-gnu.2.17",
    "manylinux_2_17_aarch64": "aarch64-linux-gnu.2.17",
    "macosx_11_0_x86_64": "x86_64-macos.11.0",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
}
"""Tag of a wheel's platform -> the target of the compiler."""

# In the root of the checkout only; the package has folders of the same names.
_LEFT_OUT: Final = {"build", "dist", "figures", "logs"}
_BACKEND: Final = "from setuptools import build_meta; print(build_meta.build_{kind}({out!r}, {settings!r}))"


class WheelError(Exception):
    """A built file, or a command of the installed package, must be as promised."""


def copied(target: Path) -> Path:
    """A copy of the checkout, without outputs: a build leaves folders behind, and takes in what earlier ones left."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        hidden = {name for name in names if name.startswith(".") or name in ("__pycache__", "gpipe_bench.egg-info")}
        hidden -= {".ci", ".github", ".gitignore"}
        if Path(folder) == ROOT:
            return hidden | _LEFT_OUT.intersection(names)
        return set(names) - {"reference"} if Path(folder) == ROOT / "results" else hidden

    return Path(copytree(ROOT, target, symlinks=True, ignore=ignored))


def built(source: Path, kind: str, out: Path, settings: Mapping[str, Sequence[str]] | None = None) -> Path:
    """The sdist or wheel that the build backend makes of ``source``, in ``out``; ``settings`` are the backend's."""
    command = [sys.executable, "-c", _BACKEND.format(kind=kind, out=str(out), settings=settings)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"{kind} must build, got\n{done.stdout[-1000:]}{done.stderr[-4000:]}")
    return out / done.stdout.splitlines()[-1]


def compiled_wheel(source: Path, out: Path, platform: str, compiler: Sequence[str]) -> Path:
    """The wheel for one platform, with the libraries of the package.

    Args:
        source: a copy of the checkout or of the sdist, which gets the libraries.
        out: folder for the wheel.
        platform: its tag, such as ``manylinux_2_17_x86_64``.
        compiler: the command that compiles C code for that platform.

    Raises:
        CompilerError: the C code does not compile.
        WheelError: the wheel does not build.
    """
    for name in LIBRARIES:
        package = source / "gpipe_bench"
        compile_c(shipped(name, package), compiler, sources_of(name, package))
    # What a build for another platform left would be packed again.
    shutil.rmtree(source / "build", ignore_errors=True)
    return built(source, "wheel", out, {"--build-option": [f"--plat-name={platform}"]})


def main() -> int:
    """Build all wheels into the folder that the command line names, and the sdist."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    with tempfile.TemporaryDirectory() as place:
        source = copied(Path(place) / "source")
        print(built(source, "sdist", out).name)
        for platform, target in TARGETS.items():
            compiler = [sys.executable, "-m", "ziglang", "cc", "-target", target]
            print(compiled_wheel(source, out, platform, compiler).name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
