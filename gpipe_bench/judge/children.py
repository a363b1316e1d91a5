"""Child processes that play cases: one, or one per device of an engine. They go from case to case until one fails."""

from __future__ import annotations

import os
import queue
import socket
import time
from multiprocessing import get_context
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor

from gpipe_bench.judge.behaviours import BEHAVIOURS
from gpipe_bench.judge.protocol import Case, Notes
from gpipe_bench.judge.runner import HANGS, adapter_of, cases_of, play

_START_S: Final = 120.0
"""Seconds that processes may take to import PyTorch and the engine."""

_LOOK_S: Final = 0.2
"""Seconds between two looks at whether the processes are alive."""

_GRACE_S: Final = 2.0
"""Seconds that the other processes get to end once one has raised: their errors may say more, or only that it ended."""


def serve(engine: str, rank: int, world: int, port: int, tasks: Any, answers: Any) -> None:  # noqa: PLR0917 - what a process is given
    """Play cases, as one process of an engine, until the task is None."""
    torch.set_num_threads(1)
    adapter = adapter_of(engine)
    if adapter.processes:
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    answers.put((rank, {}, ""))
    while (task := tasks.get()) is not None:
        behaviour, seed, index = task
        case = cases_of(BEHAVIOURS[behaviour], seed, adapter)[index]
        notes, error = play(adapter, case, rank)
        plain = {name: value.numpy() if isinstance(value, Tensor) else value for name, value in notes.items()}
        answers.put((rank, plain, error))


class _Group:
    """The processes of one size of group."""

    def __init__(self, engine: str, world: int) -> None:
        context = get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.answers, self.tasks = context.Queue(), [context.Queue() for _ in range(world)]
        self.processes = [
            context.Process(target=serve, args=(engine, rank, world, port, tasks, self.answers), daemon=True)
            for rank, tasks in enumerate(self.tasks)
        ]
        for process in self.processes:
            process.start()
        self.answered(_START_S)

    def answered(self, limit_s: float) -> tuple[Notes, str]:
        """All notes and the first error, or that some processes ended or gave no answer."""
        notes, error, waiting = Notes(), "", set(range(len(self.processes)))
        end = time.monotonic() + limit_s
        while waiting:
            dead = sorted(rank for rank in waiting if not self.processes[rank].is_alive())
            try:
                rank, found, raised = self.answers.get(timeout=max(0.0, min(_LOOK_S, end - time.monotonic())))
            except queue.Empty:
                # What ended before this look for an answer will give none.
                if dead:
                    code = self.processes[dead[0]].exitcode
                    return notes, error or f"rank {dead[0]} ended with exit status {code}, without an answer"
                if time.monotonic() < end:
                    continue
                who = ", ".join(map(str, sorted(waiting)))
                return notes, error or f"{HANGS} {limit_s:g} s from rank {who}"
            waiting.remove(rank)
            notes |= {name: torch.from_numpy(v) if hasattr(v, "shape") else v for name, v in found.items()}
            if raised and (not error or "boom" in raised):
                error, end = raised, min(end, time.monotonic() + _GRACE_S)
        return notes, error

    def end(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


class Children:
    """Groups of processes by their size; a group ends when it hangs, or when one of several processes has raised.

    Args:
        engine: see :func:`gpipe_bench.judge.runner.adapter_of`.
        processes: whether the engine has a process per device.
        limit_s: seconds until a case counts as hanging.
    """

    def __init__(self, engine: str, *, processes: bool, limit_s: float) -> None:
        self.engine, self.processes, self.limit_s = engine, processes, limit_s
        self.groups: dict[int, _Group] = {}

    def run(self, behaviour: str, seed: int, index: int, case: Case) -> tuple[Notes, str]:
        """Play one case."""
        world = case.setup.n * case.setup.copies if self.processes else 1
        if world not in self.groups:
            self.groups[world] = _Group(self.engine, world)
        group = self.groups[world]
        for tasks in group.tasks:
            tasks.put((behaviour, seed, index))
        notes, error = group.answered(self.limit_s)
        ended = not all(process.is_alive() for process in group.processes)
        if error and (self.processes or ended or error.startswith(HANGS)):
            self.groups.pop(world).end()
        return notes, error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in self.groups.values():
            group.end()
