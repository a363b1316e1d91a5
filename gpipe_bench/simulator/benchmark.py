"""How long simulations take: ``python -m gpipe_bench.simulator.benchmark [--large] [--out docs/simulator_speed.md]``.

A chain of equal layers on a P40, one per partition, one step, everything checkpointed: CPU seconds of one core, the
least of some runs, and what that is for each of the n m tasks. Then the predictions of all published tables, each time
in a process of its own: first with nothing stored, then with traces and workloads on disk. The times of the simulated
step itself do not change from machine to machine; these do.
"""

from __future__ import annotations

import argparse
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, Final

import torch
from torch import nn

from gpipe_bench.simulator.build import build_workload
from gpipe_bench.simulator.events import Settings, run
from gpipe_bench.simulator.hardware import HardwareMachine, load_profile
from gpipe_bench.simulator.workload import Workload

__all__ = ["main"]

_SIZES: Final = ((8, 32), (8, 128), (8, 512), (32, 128), (64, 64), (64, 128), (64, 256))
_LARGE: Final = ((512, 1024), (1024, 4096))
_HEAD: Final = """# How long the simulator takes

Written by `python -m gpipe_bench.simulator.benchmark --out docs/simulator_speed.md`. CPU seconds of one core
for one step of n partitions and m micro-batches, tracing aside, the least of some runs; {machine}.

| n | m | times, s | µs per task | with memory, s | µs per task |
|--:|--:|--:|--:|--:|--:|
"""
_FOOT: Final = """
Were cost linear in n m, the columns of microseconds per task would be constant; they grow with the number of tasks.
From 2^17 tasks on, pipelines whose order of issue is known beforehand are simulated cycle by cycle with arrays
(`gpipe_bench/simulator/wavefront.py`), with the same times to the nanosecond. Their peaks of memory are extrapolated
from two smaller runs (`gpipe_bench/simulator/steady.py`), and say so.
Where a host thread runs ahead of the next by 32 micro-batches, as behind a link slower than the tasks, the clock has to
simulate every task.
"""


def _chain(n: int, m: int) -> Workload:
    """Two samples per micro-batch through n layers."""
    layers = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, device="meta"), nn.ReLU()) for _ in range(n))
    )
    sample = torch.empty(2 * m, 32, 64, 64, device="meta")
    return build_workload(
        layers, balance=[1] * n, batch_size=2 * m, chunks=m, profile=load_profile("p40"), sample=sample
    )


def _seconds(action: Callable[[], Any], times: int) -> float:
    found = []
    for _ in range(times):
        before = process_time()
        action()
        found.append(process_time() - before)
    return min(found)


def _line(n: int, m: int, times: int) -> str:
    work, machine = _chain(n, m), HardwareMachine(load_profile("p40"))
    cells = []
    for memory in (False, True):
        settings = Settings(checkpoint="always", memory=memory)
        seconds = _seconds(partial(run, work, machine, settings), times)
        cells.append(f"{seconds:.2f} | {seconds / (n * m) * 1e6:.1f}")
    return f"| {n} | {m} | {' | '.join(cells)} |\n"


def _predictions(times: int = 3) -> str:
    """Seconds of the predictions from a cold start, and from traces on disk."""
    found = []
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gpipe_bench.simulator.predictions", "--cache", folder]
        for _ in range(1 + times):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([*command, "--out", f"{folder}/predictions.csv"], check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    cold, warm = found[0], min(found[1:])
    return (
        f"\nPredictions of all published tables: {cold:.1f} s with nothing stored, {warm:.1f} s with traces on disk.\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write the page.

    Args:
        arguments: of the command line; those of the process by default.
    """
    parser = argparse.ArgumentParser(prog="python -m gpipe_bench.simulator.benchmark", description=__doc__)
    parser.add_argument("--large", action="store_true", help="also pipelines of millions of tasks")
    parser.add_argument("--out", type=Path, help="write the page here")
    chosen = parser.parse_args(arguments)
    page = _HEAD.format(machine=f"{platform.machine()}, Python {platform.python_version()}")
    print(page, end="")
    for n, m in (*_SIZES, *(_LARGE if chosen.large else ())):
        line = _line(n, m, 1 if n * m > 2**17 else 3)
        print(line, end="", flush=True)
        page += line
    line = _predictions()
    print(line, end="")
    page += line
    if chosen.out is not None:
        chosen.out.write_text(page + _FOOT, encoding="utf-8")


if __name__ == "__main__":
    main()
