"""Ranks as threads of one process: a group whose sends last until they are received, and whose ranks can be killed."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

PATIENCE_S = 20.0


class World:
    """What the ranks of a group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition(threading.RLock())
        self.sent: dict[tuple[int, int, int], deque[Transfer]] = defaultdict(deque)
        self.awaited: dict[tuple[int, int, int], deque[Transfer]] = defaultdict(deque)
        self.dead: set[int] = set()

    def kill(self, rank: int) -> None:
        """Close all connections of a rank."""
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()

    def begin(self, transfer: Transfer, own: dict[Any, deque[Transfer]]) -> None:
        """Post one end of a transfer; a send and a receive that meet are done."""
        with self.changed:
            if self.dead & {*transfer.way[:2]}:
                raise RuntimeError("Connection closed by peer")
            own[transfer.way].append(transfer)
            while self.sent[transfer.way] and self.awaited[transfer.way]:
                sent, received = self.sent[transfer.way].popleft(), self.awaited[transfer.way].popleft()
                memory = sent.tensor.view(torch.uint8)
                received.tensor.view(torch.uint8)[: len(memory)].copy_(memory)
                sent.done = received.done = True
                sent.tensor = received.tensor = None
            self.changed.notify_all()


@dataclass(eq=False)
class Transfer:
    """A send or a receive on its way."""

    world: World
    rank: int
    way: tuple[int, int, int]
    tensor: torch.Tensor | None
    done: bool = field(default=False)

    def wait(self, timeout: timedelta = timedelta(seconds=PATIENCE_S)) -> None:
        with self.world.changed:
            over = self.world.changed.wait_for(
                lambda: self.done or self.world.dead & {*self.way[:2]}, timeout.total_seconds()
            )
            if not over:
                self.world.kill(self.rank)
                raise RuntimeError(f"Timed out on {self.way}")
            if not self.done:
                raise RuntimeError(f"Connection closed by peer on {self.way}")


class ThreadGroup:
    """The group as one rank has it."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world.size

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Transfer:
        transfer = Transfer(self._world, self._rank, (self._rank, rank, tag), tensors[0])
        self._world.begin(transfer, self._world.sent)
        return transfer

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Transfer:
        transfer = Transfer(self._world, self._rank, (rank, self._rank, tag), tensors[0])
        self._world.begin(transfer, self._world.awaited)
        return transfer


def run_ranks(size: int, job: Callable[[ThreadGroup], Any], world: World | None = None) -> list[Any]:
    """What ``job`` gives or raises on each rank."""
    world = world or World(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = job(ThreadGroup(world, rank))
        except BaseException as error:  # noqa: BLE001 - it is a result
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), [str(result) for result in results]
    return results


def results_of(size: int, job: Callable[[ThreadGroup], Any]) -> list[Any]:
    """As :func:`run_ranks`; raises what a rank has raised."""
    results = run_ranks(size, job)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
