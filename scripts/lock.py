"""Resolve the pinned environment and write it down in layers, for pip and for the conda environment of the rules.

    requirements/run.lock         what the package itself needs
    requirements/workflow.lock    run.lock, and what the Snakemake workflow needs
    requirements/models.lock      workflow.lock, and published networks
    requirements/dev.lock         models.lock, and what checks and tests need
    requirements/compiler.lock    a C compiler, which set-up installs where there is none; no layer has it
    workflows/envs/gpipe_bench.yaml    run.lock and workflow.lock as a conda environment: `snakemake --sdm conda`

All layers are one resolution: no package has two versions. pip-tools runs in a throw-away virtual environment, so pip's
own configuration is honoured. It resolves on the oldest Python that the project supports: what has wheels there is
asked for on the newer ones too.

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
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "requirements"
RULES_ENVIRONMENT: Final = ROOT / "workflows" / "envs" / "gpipe_bench.yaml"
OLDEST_PYTHON: Final = (3, 11)
LAYERS: Final[Mapping[str, tuple[str, ...]]] = {
    "run": (),
    "workflow": ("workflow", "slurm", "data"),
    "models": ("models",),
    "dev": ("dev",),
}
"""Layer -> extras of pyproject.toml that it adds to the layers before it."""

COMPILER: Final = "compiler"
"""The extra of pyproject.toml that is in no layer, and has a lock of its own."""

# Builds the project without build isolation; no package of the run layer asks for it on every Python.
_BUILD_BACKEND: Final = "setuptools"
_RESOLVER: Final = "pip-tools==7.6.2"
_BROUGHT_BY_TORCH: Final = re.compile(r"(?:nvidia-(?!ml-py\b)|cuda-|triton\b)")
_LOCAL_VERSION: Final = re.compile(r"\+\S+")
_HEADER: Final = "# `make lock` writes this file from pyproject.toml and requirements/pins.in.\n"
_RUN_HEADER: Final = "# The CUDA libraries of torch are not here: torch itself pins them.\n"
_COMPILER_HEADER: Final = "# Set-up installs this where there is no C compiler.\n"
_ENVIRONMENT_HEADER: Final = """\
# The environment of the rules for `snakemake --sdm conda`: `make lock` writes it from run.lock and workflow.lock.
# Rules run in the checkout, where Python finds the package: it is not installed.
channels:
  - conda-forge
dependencies:
  - python={python}
  - pip
  - pip:
"""


def pins(lock: str) -> list[str]:
    """The ``name==version`` lines of a lock, without comments and without the lock that it starts from."""
    lines = (line.split("#")[0].strip() for line in lock.splitlines())
    return [line for line in lines if line and not line.startswith("-")]


def portable(resolved: str) -> list[str]:
    """The pins of pip-compile's output that hold on every platform, without the local versions of this one."""
    return sorted(_LOCAL_VERSION.sub("", pin) for pin in pins(resolved) if not _BROUGHT_BY_TORCH.match(pin))


def split(all_pins: Sequence[str], needed: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The pins that each layer adds to those before it.

    Args:
        all_pins: of the whole environment.
        needed: layer -> pins of it and of the layers before it.

    Raises:
        ValueError: a layer needs a version that is not the whole environment's.
    """
    added: dict[str, list[str]] = {}
    for layer in LAYERS:
        before = {pin for pins_of in added.values() for pin in pins_of}
        if other := sorted(set(needed[layer]) - set(all_pins)):
            raise ValueError(f"layer {layer} must have the pins of the whole environment, got {', '.join(other)}")
        added[layer] = sorted(set(needed[layer]) - before)
    return added


def lock_text(layer: str, added: Sequence[str]) -> str:
    """The text of the lock of a layer, or of the compiler's."""
    if layer == COMPILER:
        return _HEADER + _COMPILER_HEADER + "".join(f"{pin}\n" for pin in added)
    names = list(LAYERS)
    place = names.index(layer)
    start = f"--requirement {names[place - 1]}.lock\n" if place else _RUN_HEADER
    return _HEADER + start + "".join(f"{pin}\n" for pin in added)


def rules_environment(added: Mapping[str, Sequence[str]]) -> str:
    """The conda environment of the workflow's rules."""
    header = _ENVIRONMENT_HEADER.format(python=".".join(map(str, OLDEST_PYTHON)))
    return header + "".join(f"      - {pin}\n" for pin in sorted([*added["run"], *added["workflow"]]))


def resolve() -> dict[str, list[str]]:
    """The pins that each layer adds and those of the compiler, the newest version of everything."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        venv.create(place, with_pip=True)
        python = str(place / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", _RESOLVER], check=True)
        (place / "backend.in").write_text(f"{_BUILD_BACKEND}\n", encoding="utf-8")
        whole = _compiled(python, place / "whole.txt", ["--all-extras", "--upgrade"], str(FOLDER / "pins.in"))
        # With the whole environment as constraint, a layer is that part of it that its extras lead to.
        options = ["--constraint", str(place / "whole.txt")]
        needed = {}
        for layer, extras in zip(LAYERS, accumulate(LAYERS.values()), strict=True):
            chosen = [word for extra in extras for word in ("--extra", extra)]
            made = _compiled(python, place / f"{layer}.txt", [*options, *chosen], str(place / "backend.in"))
            needed[layer] = portable(made)
        pins_of_all = portable(whole)
        added = split(pins_of_all, needed)
        in_layers = {pin for pins_of in added.values() for pin in pins_of}
        return {**added, COMPILER: [pin for pin in pins_of_all if pin not in in_layers]}


def _compiled(python: str, output: Path, options: Sequence[str], source: str) -> str:
    plain = ["--strip-extras", "--allow-unsafe", "--no-header", "--no-annotate", "--quiet"]
    plain += ["--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host"]
    command = [python, "-m", "piptools", "compile", *plain, *options, "--output-file", str(output)]
    subprocess.run([*command, source, "pyproject.toml"], check=True, cwd=ROOT)
    return output.read_text(encoding="utf-8")


def main() -> int:
    """Write all files; exit status 2 on a Python that is not the oldest supported one."""
    if sys.version_info[:2] != OLDEST_PYTHON:
        oldest, here = (".".join(map(str, version)) for version in (OLDEST_PYTHON, sys.version_info[:2]))
        print(f"python must be {oldest}, got {here}; run: make lock PYTHON=python{oldest}", file=sys.stderr)
        return 2
    added = resolve()
    for layer, new in added.items():
        (FOLDER / f"{layer}.lock").write_text(lock_text(layer, new), encoding="utf-8")
        print(f"wrote {layer}.lock: {len(new)} pinned packages")
    RULES_ENVIRONMENT.write_text(rules_environment(added), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
