"""Functions in several processes that have a process group over gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import CONTEXT

PATIENCE_S = 240


def run_processes(size: int, folder: Any, job: Callable[..., Any], *arguments: object) -> list[Any]:
    """What ``job(rank, ...)`` gives or raises in each process; None for one that was killed."""
    processes = [
        CONTEXT.Process(target=_run, args=(rank, size, str(folder), job, arguments), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not hanging, f"ranks {hanging} did not end"
    files = [Path(folder) / f"{rank}.pt" for rank in range(size)]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def die() -> None:
    """End this process at once, as a kill from outside does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _run(rank: int, size: int, folder: str, job: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    try:
        result = job(rank, *arguments)
    except BaseException as error:  # noqa: BLE001 - it is a result
        result = type(error).__name__, str(error)
    torch.save(result, f"{folder}/{rank}.pt")
