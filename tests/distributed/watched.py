"""Processes over gloo that run until all have done their work, or until none of them can go on.

No clock decides which of the two it is. Processes are stuck once every thread of all of them sleeps, and no main thread
has run since, several times in a row. What arrives on a socket wakes a thread, and a thread that could run does not
count as asleep, however busy the machine is. Threads of gloo wake up every 10 ms, which at most costs a sample.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.processes import CONTEXT

SAMPLE_S, SAMPLES, PATIENCE_S = 0.01, 5, 120
STARTS, DONE = -1, 1 << 40


def watched(size: int, folder: Path, job: Callable[..., Any], *arguments: object) -> dict[int, int]:
    """Run ``job(rank, places, ...)`` in processes of one group.

    Args:
        size: of the group.
        folder: empty.
        job: notes in ``places[rank]`` where it is, a number that is not negative.
        arguments: of the job.

    Returns:
        For each rank that is stuck its place; nothing if all have done their jobs.

    Raises:
        AssertionError: a job raises, or no answer comes in time.
    """
    places = shared(folder / "places", size)
    places.fill_(STARTS)
    processes = [CONTEXT.Process(target=_run, args=(rank, size, folder, job, arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        begin_s, seen, same = monotonic(), None, 0
        while int(places.min()) < DONE:
            ended = connection.wait([process.sentinel for process in processes], SAMPLE_S)
            assert not ended, "\n".join(file.read_text() for file in folder.glob("error*"))
            assert monotonic() < begin_s + PATIENCE_S, f"no answer: {places.tolist()}"
            now = places.tolist(), *(_asleep(process.pid) for process in processes)
            same = same + 1 if now == seen and None not in now and STARTS not in now[0] else 0
            seen = now
            if same == SAMPLES:
                break
        return {rank: place for rank, place in enumerate(places.tolist()) if place != DONE}
    finally:
        for process in processes:
            process.kill()
            process.join()


def shared(file: Path, size: int) -> Tensor:
    """Numbers that several processes see, in a file that is made if it is missing."""
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.int64)


def _asleep(pid: int | None) -> str | None:
    """How often the main thread of a process has run, if all of its threads sleep now."""
    with suppress(OSError):  # a thread may end meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            if (task / "stat").read_text().rpartition(")")[2].split()[0] != "S":
                return None
        lines = Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines()
        return "".join(line for line in lines if "ctxt_switches" in line)
    return None


def _run(rank: int, size: int, folder: Path, job: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
        places = shared(folder / "places", size)
        job(rank, places, *arguments)
        places[rank] = DONE
        signal.pause()  # others may still receive
    except BaseException:  # noqa: BLE001 - it is shown by the process that waits
        (folder / f"error{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
