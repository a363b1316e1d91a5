"""What runs in the processes of contenders: one case, opened, visited in turns, and gone.

The processes are forks of a server that has loaded PyTorch and run nothing. A package is loaded in the processes of its
contender alone.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

# Once for all: the first torch.utils.checkpoint of a process would load the compiler of PyTorch, for seconds.
import torch._dynamo
import torch.distributed as dist

import gpipe_bench
from gpipe_bench.measure.environment import environment_facts
from gpipe_bench.suite.running.failures import status_of
from studies.peers.cases import PeerCase
from studies.peers.seat import Seat, Step, build
from studies.peers.workloads import make_work

_TIMEOUT: Final = timedelta(seconds=60)
_steps: list[Step] = []

Answer = tuple[str, str, Any]
"""Status and reason, as in rows, and a value."""

Times = tuple[float, float, float]
"""Start and end of a step on the machine's clock, and its CPU seconds."""


def answer(function: Callable[..., Any], *arguments: Any) -> Answer:
    """The value of a function of this module, or why there is none: errors of a package need not be picklable."""
    try:
        return "ok", "", function(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever a contender raises becomes a row
        traceback.print_exc()
        return (*status_of(error), None)


def start() -> int:
    """The number of this process, which ends with its parent."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return os.getpid()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def open_case(seat: Seat, store: str) -> str:
    """Build the contender and train once; gives the version of its package.

    Args:
        seat: what this process is in the race.
        store: file by which the ranks of a contender find each other.
    """
    contender, case = seat.contender, seat.case
    torch.set_num_threads(case.cores if contender.all_threads else 1)
    if seat.place != "cpu":
        torch.accelerator.set_device_index(torch.device(seat.place).index)
    if seat.ranks > 1 or contender.process_per_device:
        if Path("/sys/class/net/lo").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "gloo" if case.device == "cpu" else "nccl"
        store = f"file://{store}"
        dist.init_process_group(backend, init_method=store, rank=seat.rank, world_size=seat.ranks, timeout=_TIMEOUT)
    step = build(seat)
    # The first step agrees on shapes and opens connections.
    step()
    _steps.append(step)
    try:
        return version(contender.package)
    except PackageNotFoundError:  # this project may run from its folder
        return gpipe_bench.__version__


def visit(warmup: int, steps: int) -> list[Times]:
    """Train; the times of the steps after the first ones, which are not timed. All ranks begin a step together."""
    (step,) = _steps
    found = []
    for number in range(warmup + steps):
        if dist.is_initialized():
            dist.barrier()
            step.synchronize()
        begin, used = time.perf_counter(), time.process_time()
        step()
        times = begin, time.perf_counter(), time.process_time() - used
        found += [times] if number >= warmup else []
    return found


def gradients() -> tuple[list[Any], float]:
    """The gradients that a step leaves, as arrays, and the forward passes of a step."""
    (step,) = _steps
    step()
    return [gradient.numpy() for gradient in step.gradients()], step.forward_passes()


def facts(case: PeerCase) -> dict[str, Any]:
    """Machine and software, as columns of rows."""
    return environment_facts(case.partition_devices())


def find_balance(case: PeerCase, partitions: int, seconds: float) -> list[int]:
    """Layers per partition, by measured time of the layers on one thread."""
    from gpipe_bench.balance import balance_by_time  # not in the processes of contenders

    torch.set_num_threads(1)
    work, place = make_work(case), case.partition_devices()[0]
    sample = work.batch.chunk(case.chunks)[0]
    return balance_by_time(partitions, work.model.to(place), sample.to(place), timeout=seconds, device=place)
