"""How long simulations take: ``python -m studies.simulator.speed [--out FILE.md]``.

CPU seconds of one core, the least of some runs: the predictions of all published tables,
each time in a process of its own, and :func:`gpipe_bench.simulator.simulate` at its defaults, memory and two steps
included. Simulated times do not change from machine to machine; these do.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, Final

import torch
from torch import nn

from gpipe_bench.components import Components
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.simulator.api import Model, simulate
from gpipe_bench.util.files import write_files

_SIZES: Final = ((8, 32), (8, 128), (8, 512), (32, 128), (64, 64), (64, 128), (64, 256), (256, 1024))
_OTHER_SIZE: Final = (64, 256)
_PROFILE: Final = "h100"
_SAMPLES, _FEATURES = 8, 1024
_WAYS: Final[dict[str, dict[str, Any]]] = {
    "all components off": {"components": Components(*[False] * 5)},
    **{f"`{name}`": {"schedule": name} for name in SCHEDULES},
    "`1f1b`, two partitions per device": {"schedule": "1f1b", "devices": tuple(j // 2 for j in range(_OTHER_SIZE[0]))},
    "`1f1b`, transfers by the host": {"schedule": "1f1b", "transfer": "host"},
}
_MODELS: Final = (Model("amoebanet-d", {"L": 60, "D": 256}), Model("unet", {"B": 5, "C": 32}))

_HEAD: Final = """# How long the simulator takes

Written by `python -m studies.simulator.speed`. CPU seconds of one core, the least
of some runs; {machine}.

| what | s |
|:--|--:|
"""
_TABLE: Final = """
## `simulate()` by size

{profile}, n linear layers, one per partition, m micro-batches, defaults: two steps, with memory, tracing included.
Were cost linear in n m, the microseconds per task would be constant. Each step is one of n m tasks.

| n | m | `simulate()`, s | µs per task and step |
|--:|--:|--:|--:|
"""
_OTHERS: Final = """
## Other ways to run n = {n}, m = {m}

| what | µs per task and step |
|:--|--:|
"""


def _seconds(action: Callable[[], Any], times: int) -> float:
    found = []
    for _ in range(times):
        before = process_time()
        action()
        found.append(process_time() - before)
    return min(found)


@cache
def _simulated(n: int, m: int, **options: Any) -> float:
    """A chain of n equal layers, one for each partition."""
    chain = nn.Sequential(*(nn.Linear(_FEATURES, _FEATURES, device="meta") for _ in range(n)))
    sample = torch.empty(_SAMPLES, _FEATURES, device="meta")
    options |= {"balance": [1] * n, "batch_size": _SAMPLES * m, "chunks": m, "sample": sample, "profile": _PROFILE}
    run = partial(simulate, chain, **options)
    return _seconds(run, 1 if n * m > 2**17 else 3)


def _predictions(times: int = 3) -> tuple[float, float]:
    """Seconds of the predictions from a cold start, and from traces on disk."""
    found = []
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gpipe_bench", "predictions", "--cache", folder]
        command += ["--out", f"{folder}/predictions.csv"]
        # From the second time on modules are compiled, wherever the interpreter is told to leave them.
        compiled = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
        for number in range(2 + times):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            environment = compiled if number else None
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return found[0], min(found[2:])


def _of_model(model: Model, n: int, m: int, cache: str) -> float:
    """A model of the suite, cut into equal numbers of layers, from traces on disk."""
    from gpipe_bench.models.table import check_arguments, model_spec

    layers = model_spec(model.name).layers(check_arguments(model.name, model.arguments))
    balance = [layers // n + (j < layers % n) for j in range(n)]
    run = partial(simulate, model, balance=balance, batch_size=2 * m, chunks=m, profile=_PROFILE, cache=cache)
    run()
    return _seconds(run, 1)


def _page(machine: str) -> Iterator[str]:
    yield _HEAD.format(machine=f"{machine}, Python {platform.python_version()}")
    cold, warm = _predictions()
    yield f"| predictions of all published tables, nothing stored | {cold:.1f} |\n"
    yield f"| the same with traces and compiled modules on disk | {warm:.1f} |\n"
    yield f"| `simulate()` of n = 64 linear layers, m = 256 | {_simulated(64, 256):.1f} |\n"
    with TemporaryDirectory() as folder:
        for model in _MODELS:
            seconds = _of_model(model, 64, 256, folder)
            what = ", ".join(f"{name} = {value}" for name, value in model.arguments.items())
            yield f"| `simulate()` of {model.name} ({what}), n = 64, m = 256, traces on disk | {seconds:.1f} |\n"
    yield _TABLE.format(profile=_PROFILE.upper())
    for n, m in _SIZES:
        seconds = _simulated(n, m)
        yield f"| {n} | {m} | {seconds:.2f} | {seconds / (2 * n * m) * 1e6:.2f} |\n"
    n, m = _OTHER_SIZE
    yield _OTHERS.format(n=n, m=m)
    for name, options in _WAYS.items():
        yield f"| {name} | {_simulated(n, m, **options) / (2 * n * m) * 1e6:.2f} |\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page, and write it.

    Args:
        arguments: of the command line; those of the process by default.
    """
    parser = argparse.ArgumentParser(prog="python -m studies.simulator.speed", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the page here")
    parser.add_argument("--machine", default=platform.machine(), help="what the page calls this machine")
    chosen = parser.parse_args(arguments)
    page = ""
    for text in _page(chosen.machine):
        page += text
        print(text, end="", flush=True)
    if chosen.out is not None:
        write_files({chosen.out: page})


if __name__ == "__main__":
    main()
