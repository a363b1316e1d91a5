"""Build sdist and wheel, install the wheel where nothing but its dependencies is, and run its commands there.

    python -m scripts.check_wheel            about a minute, no network

The environment is clean without a download: a new virtual environment gets the wheel itself and links to the installed
packages that the wheel depends on, no others. Commands run in a folder whose own modules fail when they are imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpipe_bench.native.compiler import find_compiler
from scripts.wheels import WheelError, built, compiled_wheel, copied

IN_SDIST: Final = (
    *("CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "README.md", "Snakefile", "environment.yml"),
    *("config/config.yaml", "docs", "examples", "models/unet.py", "gpipe_bench/models/unet.py", "profiles/default"),
    *("requirements/lock.txt", "results/reference/published/published.csv", "scripts/setup.sh", "tests/conftest.py"),
    *("workflow/envs/gpipe_bench.yaml", "workflow/rules/cells.smk"),
)
OWN_MODULES: Final = ("models.py", "scripts.py", "tests/__init__.py", "data.py", "config.py")


TRAINING: Final = """
import torch
from torch import nn
from gpipe_bench import GPipe, Pipe

layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)]
batch, target = torch.rand(16, 8), torch.rand(16, 4)
for engine in (GPipe, Pipe):
    model = nn.Sequential(*layers)
    if engine is GPipe:
        model = GPipe(model, balance=[2, 1], devices=["cpu", "cpu"], chunks=4)
    else:
        model = Pipe(model, chunks=4)
    output = model(batch)
    output = output if torch.is_tensor(output) else output.local_value()
    loss = nn.functional.mse_loss(output, target)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    print("trained with", engine.__name__)
"""
_REFERENCE: Final = "import gpipe_bench.data; print(gpipe_bench.data.REFERENCE_FOLDER)"


@dataclass(frozen=True, slots=True)
class Command:
    """A command and how it must end.

    Attributes:
        words: after ``python``.
        says: what stands in its output.
        status: exit status; with 2, stderr is one line.
    """

    words: tuple[str, ...]
    says: str
    status: int = 0


def _bench(*words: str, says: str, status: int = 0) -> Command:
    return Command(("-m", "gpipe_bench", *words), says, status)


def commands(reference: Path) -> Iterator[Command]:
    """The commands, each after those whose files it reads.

    Args:
        reference: folder of the reference results of the installed package.
    """
    ablation = str(reference / "simulated" / "p40" / "ablation.csv")
    peers = str(reference / "measured")
    yield Command(("-c", TRAINING), "trained with Pipe")
    yield _bench("--version", says=".")
    yield Command(("-m", "gpipe_bench.native"), "")
    yield _bench("simulate", "--balance", "34-76-70-61", says="published")
    yield _bench("simulate-published", "ablation", "--out", "published.json", says="")
    yield _bench("predictions", "--table", "ablation", "--out", "predictions.csv", says="written: predictions.csv")
    yield _bench("advise", "--model", "unet", "--model-args", "depth=1;B=1;C=2;size=4", "--devices", "2", says="chunks")
    yield _bench("balance", "--model", "unet", "--model-args", "depth=1;B=1;C=2;size=4", "--partitions", "2", says="-")
    yield _bench("config", "check", says="ablation: ")
    yield _bench("published", "--out", "rows.csv", says="wrote rows.csv")
    yield _bench("table", "--rows", ablation, says="dep-str-ptl")
    yield _bench("figure", "ablation", "--rows", ablation, "--out", "figures/ablation", says="ablation.svg")
    yield _bench("report", "--results", str(Path(ablation).parent), "--out", "report.html", says="report.html")
    yield _bench("playground", "--export", "site", says="index.html")
    yield _bench("verify", ablation, "--predictions", "predictions.csv", "--part", "all", says="checks: ")
    yield _bench("compare", ablation, ablation, says="")
    yield _bench("datapackage", "write", says="must run from a checkout", status=2)
    yield _bench("figure", "ablation", "--rows", f"{peers}/none.csv", "--out", "f", says="none.csv", status=2)


def run_commands(python: Path, folder: Path) -> list[str]:
    """Run all commands in ``folder``; gives a line for each that does not end as it must."""
    environment = {
        "PATH": f"{python.parent}{os.pathsep}{os.defpath}",
        "HOME": str(folder.parent),
        "MPLBACKEND": "agg",
        "TERM": "dumb",
        # The wheel has the libraries: to compile them fails.
        "CC": "false",
    }
    asked = subprocess.run(
        [python, "-P", "-c", _REFERENCE], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return [
        problem
        for command in commands(Path(asked.stdout.strip()))
        if (problem := _problem(command, python, folder, environment))
    ]


def _problem(command: Command, python: Path, folder: Path, environment: dict[str, str]) -> str:
    start = time.monotonic()
    done = subprocess.run(
        [python, *command.words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    name = " ".join(word if "\n" not in word else "..." for word in command.words)
    print(f"{time.monotonic() - start:6.1f} s  {name}", flush=True)
    output = done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    if done.returncode == command.status and command.says in output and (command.status != 2 or len(lines) == 1):
        return ""
    ended = f"ended with {done.returncode}"
    return f"{name} must end with {command.status} and say {command.says!r}, but {ended}\n{output[-3000:]}"


def unpacked_sdist(sdist: Path, target: Path) -> Path:
    """The folder in an sdist, after a look at what it holds."""
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
        if links := [member.name for member in members if not (member.isfile() or member.isdir())]:
            raise WheelError(f"sdist must hold files themselves, got links: {', '.join(links[:5])}")
        top = members[0].name.partition("/")[0]
        names = {member.name.partition("/")[2] for member in members}
        if missing := [name for name in IN_SDIST if name not in names]:
            raise WheelError(f"sdist must hold {', '.join(missing)}; add to MANIFEST.in")
    # Built here, and looked at above: it needs no filter, which Python 3.11 has from 3.11.4 on.
    shutil.unpack_archive(sdist, target)
    return target / top


def check_contents(wheel: Path, source: Path) -> None:
    """Look whether a wheel has one top-level name, and every file of the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    if tops != {"gpipe_bench"}:
        raise WheelError(f"wheel must install gpipe_bench alone, got {', '.join(sorted(tops))}")
    files = (path.relative_to(source).as_posix() for path in (source / "gpipe_bench").rglob("*") if path.is_file())
    if missing := sorted(set(files) - names):
        raise WheelError(f"wheel must hold every file of the package, got none of {', '.join(missing[:5])}")


def dependencies(requirements: Iterable[str]) -> set[str]:
    """Names of all packages that ``requirements`` lead to, with the extras that each asks for."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = list(_applying(requirements))
    while waiting:
        asked = waiting.pop()
        key = canonicalize_name(asked.name), frozenset(asked.extras)
        if key not in found:
            found.add(key)
            waiting += _applying(_requires(asked.name), key[1])
    return {name for name, _ in found}


def _applying(requirements: Iterable[str], extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """The requirements that hold on this machine."""
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def _requires(name: str) -> list[str]:
    try:
        return distribution(name).requires or []
    except PackageNotFoundError as error:
        raise WheelError(f"{name} must be installed, since the wheel depends on it; make setup LAYER=dev") from error


def installed(wheel: Path, place: Path) -> Path:
    """The Python of a new environment with the wheel, and with links to the packages it depends on."""
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    (target,) = place.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().partition("\n\n")[0].splitlines()
    asked = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    for name in sorted(dependencies(asked)):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (target / top).exists():
                (target / top).symlink_to(Path(str(found.locate_file(top))))
    return python


def collect_tests(source: Path) -> None:
    """Look whether pytest finds the tests of an unpacked sdist, with the packages of this environment."""
    # Nothing runs: no assertion has to explain itself.
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", "--assert=plain"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"tests of the sdist must be collected, got\n{done.stdout[-3000:]}{done.stderr[-1000:]}")


def check(place: Path) -> None:
    """Build, install and run in ``place``.

    Raises:
        WheelError: something is not as promised.
    """
    sdist = built(copied(place / "source"), "sdist", place / "dist")
    source = unpacked_sdist(sdist, place / "sdist")
    # With libraries for this machine: the commands need no compiler.
    wheel = compiled_wheel(source, place / "dist", sysconfig.get_platform(), find_compiler() or ["cc"])
    check_contents(wheel, source)
    print(f"built {sdist.name} and {wheel.name}", flush=True)
    python = installed(wheel, place / "environment")
    folder = place / "elsewhere"
    for name in OWN_MODULES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"raise SystemExit('{name} of the user must not be imported')\n", encoding="utf-8")
    if problems := run_commands(python, folder):
        raise WheelError("\n".join(problems))
    collect_tests(source)
    print("collected the tests of the sdist", flush=True)


def main() -> int:
    """Check in a temporary folder; exit status 1 with what is wrong."""
    with tempfile.TemporaryDirectory() as place:
        try:
            check(Path(place))
        except WheelError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print("the wheel works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
