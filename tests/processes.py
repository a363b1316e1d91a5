"""Functions in processes of their own, which have imported PyTorch when they begin: one interpreter starts for all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload([
    "gpipe_bench.engine.gpipe",
    "gpipe_bench.cli.emulate",
    "gpipe_bench.emulator.script",
    "torch.distributed.pipelining",
    "torch.fx.experimental.symbolic_shapes",  # what a first backward pass imports
    "pytest",  # what a process of pytest begins with
])  # fmt: skip


def apart(function: Callable[..., Any], *arguments: object) -> Any:
    """What a function returns, or raises, in a process that has run nothing else."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        return pool.submit(function, *arguments).result()


def command(words: Sequence[object], folder: Path) -> CompletedProcess[str]:
    """``gpipe-bench`` with some words, run in a folder: its exit status, and what it printed."""
    with TemporaryDirectory() as place:
        outputs = [Path(place) / name for name in ("stdout", "stderr")]
        process = CONTEXT.Process(target=_command, args=([*map(str, words)], folder, outputs, {**os.environ}))
        process.start()
        process.join()
        return CompletedProcess([*words], process.exitcode, *(output.read_text() for output in outputs))


def _command(words: list[str], folder: Path, outputs: list[Path], environment: dict[str, str]) -> None:
    from gpipe_bench.cli import main

    os.chdir(folder)
    # Libraries of the process that asks may have changed what it hands on otherwise, such as the number of columns.
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["gpipe-bench", *words]
    main()
