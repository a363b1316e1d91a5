"""Ranks as threads of one process: a group whose sends last until they are received, and whose ranks can be killed.

Time is virtual: when every rank waits, it passes until the first of them gives up. So nothing here depends on how fast
the ranks are. As over gloo, a wait that takes too long closes the connections of its kind: news have others.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from typing import Any

import torch

PATIENCE_S = 20.0
NEWS = 2
"""The tag of news, as in :mod:`gpipe_bench.distributed.failures`."""


class World:
    """What the ranks of a group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition(threading.RLock())
        self.sent: dict[tuple[int, int, int], deque[Transfer]] = defaultdict(deque)
        self.awaited: dict[tuple[int, int, int], deque[Transfer]] = defaultdict(deque)
        self.closed: set[tuple[int, bool]] = set()
        self.running: set[int] = set()
        self.waits: list[Wait] = []
        self.now_s = 0.0

    def kill(self, rank: int) -> None:
        """Close all connections of a rank."""
        for news in (True, False):
            self.close(rank, news=news)

    def close(self, rank: int, *, news: bool) -> None:
        """Close its connections for news, or the others."""
        with self.changed:
            self.closed.add((rank, news))
            self.changed.notify_all()

    def is_closed(self, way: tuple[int, int, int]) -> bool:
        """Whether one of the two ranks has closed this connection."""
        return any((rank, way[2] == NEWS) in self.closed for rank in way[:2])

    def begin(self, transfer: Transfer, own: dict[Any, deque[Transfer]]) -> None:
        """Post one end of a transfer; a send and a receive that meet are done."""
        with self.changed:
            if self.is_closed(transfer.way):
                raise RuntimeError("Connection closed by peer")
            own[transfer.way].append(transfer)
            while self.sent[transfer.way] and self.awaited[transfer.way]:
                sent, received = self.sent[transfer.way].popleft(), self.awaited[transfer.way].popleft()
                memory = sent.tensor.view(torch.uint8)
                received.tensor.view(torch.uint8)[: len(memory)].copy_(memory)
                sent.done = received.done = True
                sent.tensor = received.tensor = None
            self.changed.notify_all()

    def wait(self, rank: int, until: Callable[[], Any], seconds: float) -> bool:
        """Let a rank wait, so long at the most; whether what it waits for is there."""
        with self.changed:
            wait = Wait(rank, until, self.now_s + seconds)
            self.waits.append(wait)
            self.pass_time()
            self.changed.wait_for(lambda: until() or self.now_s >= wait.end_s)
            self.waits.remove(wait)
            return bool(until())

    def pass_time(self) -> None:
        """If all ranks wait, and none for what is there: until the first one gives up."""
        if self.running <= {wait.rank for wait in self.waits} and self.waits:
            if not any(wait.until() or self.now_s >= wait.end_s for wait in self.waits):
                self.now_s = min(wait.end_s for wait in self.waits)
            self.changed.notify_all()

    def end(self, rank: int) -> None:
        """A rank does nothing any more."""
        with self.changed:
            self.running.discard(rank)
            self.pass_time()
            self.changed.notify_all()


@dataclass(eq=False)
class Wait:
    """A rank that waits, and until when."""

    rank: int
    until: Callable[[], Any]
    end_s: float


@dataclass(eq=False)
class Transfer:
    """A send or a receive on its way."""

    world: World
    rank: int
    way: tuple[int, int, int]
    tensor: torch.Tensor | None
    done: bool = field(default=False)

    def wait(self, timeout: timedelta = timedelta(seconds=PATIENCE_S)) -> None:
        world = self.world
        if not world.wait(self.rank, lambda: self.done or world.is_closed(self.way), timeout.total_seconds()):
            world.close(self.rank, news=self.way[2] == NEWS)
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

    def silence(self) -> None:
        """Do nothing until all others have ended."""
        self._world.wait(self._rank, lambda: self._world.running == {self._rank}, inf)

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
        finally:
            world.end(rank)

    world.running = {*range(size)}
    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not any(thread.is_alive() for thread in threads), [str(result) for result in results]
    return results


def results_of(size: int, job: Callable[[ThreadGroup], Any]) -> list[Any]:
    """As :func:`run_ranks`; raises what a rank has raised."""
    results = run_ranks(size, job)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
