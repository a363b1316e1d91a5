"""Resolve the pinned environment and write it down twice: requirements.lock for pip, environment.yml for conda.

pip-tools runs in a throw-away virtual environment, so pip's own configuration is honoured. It resolves on the
oldest Python that the project supports: what has wheels there is asked for on the newer ones too.

Left out on purpose: what torch brings along on its own, pinned by exact version in its own metadata (CUDA
libraries, Triton). Those exist for some platforms only, and differ between the CPU and the CUDA builds of one torch
release.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
LOCK: Final = ROOT / "requirements.lock"
ENVIRONMENT: Final = ROOT / "environment.yml"
OLDEST_PYTHON: Final = (3, 11)

_RESOLVER: Final = "pip-tools==7.6.2"
_BROUGHT_BY_TORCH: Final = re.compile(r"(?:nvidia-(?!ml-py\b)|cuda-|triton\b)")
_LOCAL_VERSION: Final = re.compile(r"\+\S+")
_HEADER: Final = """\
# The exact environment of the suite: `make lock` writes it from pyproject.toml and requirements.in.
# The CUDA libraries of torch are not here: torch itself pins them.
"""
_ENVIRONMENT_HEADER: Final = """\
# The environment of requirements.lock for conda users: `make lock` writes it.
#   conda env create --file environment.yml && conda activate gpipe_bench && pip install --no-deps --editable .
name: gpipe_bench
channels:
  - conda-forge
dependencies:
  - python={python}
  - pip
  - pip:
"""


def pins(lock: str) -> list[str]:
    """The ``name==version`` lines of a lock, without comments."""
    return [line.split("#")[0].strip() for line in lock.splitlines() if line.split("#")[0].strip()]


def portable(resolved: str) -> str:
    """The pins of pip-compile's output that hold on every platform, without the local versions of this one."""
    kept = sorted(_LOCAL_VERSION.sub("", pin) for pin in pins(resolved) if not _BROUGHT_BY_TORCH.match(pin))
    return _HEADER + "".join(f"{pin}\n" for pin in kept)


def environment_yml(lock: str) -> str:
    """The conda environment that holds what the lock pins."""
    header = _ENVIRONMENT_HEADER.format(python=".".join(map(str, OLDEST_PYTHON)))
    return header + "".join(f"      - {pin}\n" for pin in pins(lock))


def resolve() -> str:
    """What pip-compile resolves for all extras of pyproject.toml, the newest version of everything."""
    with tempfile.TemporaryDirectory() as place:
        venv.create(place, with_pip=True)
        python, output = str(Path(place, "bin", "python")), Path(place, "resolved.txt")
        subprocess.run([python, "-m", "pip", "install", "--quiet", _RESOLVER], check=True)
        options = ["--all-extras", "--strip-extras", "--allow-unsafe", "--upgrade", "--no-header", "--no-annotate"]
        options += ["--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host"]
        command = [python, "-m", "piptools", "compile", *options, "--output-file", str(output)]
        subprocess.run([*command, "requirements.in", "pyproject.toml"], check=True, cwd=ROOT)
        return output.read_text(encoding="utf-8")


def main() -> int:
    """Write both files; exit status 2 on a Python that is not the oldest supported one."""
    if sys.version_info[:2] != OLDEST_PYTHON:
        oldest, here = (".".join(map(str, version)) for version in (OLDEST_PYTHON, sys.version_info[:2]))
        print(f"python must be {oldest}, got {here}; run: make lock PYTHON=python{oldest}", file=sys.stderr)
        return 2
    lock = portable(resolve())
    LOCK.write_text(lock, encoding="utf-8")
    ENVIRONMENT.write_text(environment_yml(lock), encoding="utf-8")
    print(f"wrote {LOCK.name} and {ENVIRONMENT.name}: {len(pins(lock))} pinned packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
