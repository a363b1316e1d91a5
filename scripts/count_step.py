"""Count the files and functions of this project that one training step of two linear layers runs through.

    python -m scripts.count_step

A function counts once, however often it is called; comprehensions and lambdas belong to the function around them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import gpipe_bench
from gpipe_bench import GPipe

_PACKAGE = str(Path(gpipe_bench.__file__).parent)
EXECUTORS = {"paper": None, "runtime": "gpipe"}


def step_of(schedule: str | None) -> Callable[[], None]:
    """A training step of two linear layers in two partitions on the CPU; the first batch has been trained already."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, schedule=schedule)
    batch = torch.ones(4, 2)

    def step() -> None:
        torch.autograd.backward(pipe(batch).sum())

    step()
    return step


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
    for name, schedule in EXECUTORS.items():
        files, functions = counted(step_of(schedule))
        print(f"{name}: {len(files)} files, {len(functions)} functions")
        if "--all" in sys.argv:
            for file, function in sorted(functions):
                print(f"  {file}  {function}")


if __name__ == "__main__":
    main()
