"""Count the files and functions of this project that a newcomer's ways run through: what there is to read for each.

    python -m scripts.count_step [--all]

The ways: a training step of two linear layers by each executor, a simulated and an emulated step of them, and the way
from the configuration to a figure, with simulated cells. A function counts once, however often it is called;
comprehensions and lambdas belong to the function around them.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any, Final, NoReturn

import torch
import yaml
from torch import nn

import gpipe_bench
from gpipe_bench import GPipe
from gpipe_bench.emulator import prepare

_PACKAGE = str(Path(gpipe_bench.__file__).parent)
EXECUTORS: Final[Mapping[str, str | None]] = {"paper": None, "runtime": "gpipe"}


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def step_of(schedule: str | None) -> Callable[[], None]:
    """A training step of two linear layers in two partitions on the CPU; the first batch has been trained already."""
    pipe = GPipe(_layers(), [1, 1], devices=["cpu"] * 2, chunks=2, schedule=schedule)
    batch = torch.ones(4, 2)

    def step() -> None:
        torch.autograd.backward(pipe(batch).sum())

    step()
    return step


def simulated_step() -> None:
    """Simulate a step of two linear layers, none of which is in a cache."""
    from gpipe_bench.simulator import simulate

    simulate(_layers(), sample=torch.ones(4, 2), balance=[1, 1], batch_size=4, chunks=2, profile="p40", cache=None)


def emulated_step() -> None:
    """Emulate it, in this process, which has virtual devices."""
    from gpipe_bench.emulator import emulate

    emulate(_layers(), sample=torch.ones(4, 2), balance=[1, 1], batch_size=4, chunks=2, profile="p40")


def config_to_figure() -> None:
    """From the default configuration to the figure of the simulated ablation."""
    from gpipe_bench.cli import main as command
    from gpipe_bench.data import PUBLISHED_FOLDER
    from gpipe_bench.suite.experiments.config import base_config
    from gpipe_bench.suite.experiments.plan import make_plan

    with TemporaryDirectory() as name:
        folder = Path(name)
        plan = make_plan(yaml.safe_load(base_config().read_text()), [str(base_config())])
        jobs = [job for job in plan.tables["ablation"].jobs if job.evidence == "simulated"]
        cells, rows = plan.write_cells(folder), folder / "ablation.csv"
        for job in jobs:
            out = folder / Path(job.path).name
            own = ["--cells", cells, "--only", job.only, "--timelines", job.kept]
            _quietly(command, "simulate", *own, "--out", out)
        raw = [folder / Path(job.path).name for job in jobs]
        digests = ",".join(cell.id.rpartition("-")[2] for job in jobs for cell in job.cells)
        _quietly(
            command, "collect", "--experiment", "ablation", "--out", rows, *raw, "--cells", digests,
            "--published", PUBLISHED_FOLDER,
        )  # fmt: skip
        _quietly(command, "figure", "ablation", "--rows", rows, "--evidence", "simulated", "--out", folder / "ablation")


def _quietly(command: Callable[[list[str]], NoReturn], *words: object) -> None:
    """Run a command, whose words matter only if it fails."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as problems:
        try:
            command([str(word) for word in words])
        except SystemExit as end:
            if end.code:
                raise RuntimeError(problems.getvalue()) from end


WAYS: Final[Mapping[str, Callable[[], Callable[[], None]]]] = {
    "step of the paper's executor": lambda: step_of(EXECUTORS["paper"]),
    "step of the runtime": lambda: step_of(EXECUTORS["runtime"]),
    "simulated step": lambda: simulated_step,
    "emulated step": lambda: emulated_step,
    "configuration to figure": lambda: config_to_figure,
}
"""Each gives what is run while it is counted."""


def counted(step: Callable[[], None]) -> tuple[set[str], set[tuple[str, str]]]:
    """The files, and the (file, function) pairs, of this package that a step runs through, in whatever thread."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    here = [code for code in seen if code.co_filename.startswith(_PACKAGE) and not code.co_name.startswith("<")]
    functions = {(str(Path(code.co_filename).relative_to(_PACKAGE)), code.co_qualname) for code in here}
    return {file for file, _ in functions}, functions


def main() -> None:
    """Print the counts, and with ``--all`` every function."""
    # PyTorch asks for devices at the first backward pass.
    prepare("p40")
    for name, way in WAYS.items():
        files, functions = counted(way())
        print(f"{name}: {len(files)} files, {len(functions)} functions")
        if "--all" in sys.argv:
            for file, function in sorted(functions):
                print(f"  {file}  {function}")


if __name__ == "__main__":
    main()
