"""The commands that an installed wheel must run, in a folder that is no checkout."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
