"""Ranks as threads of one process: a group whose sends last until they are received, and whose ranks can be killed."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

PATIENCE_S = 20.0


class World:
    """What the ranks of a group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int, int], deque[Transfer]] = defaultdict(deque)
        self.dead: set[int] = set()

    def kill(self, rank: int) -> None:
        """Close all connections of a rank."""
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()


@dataclass(eq=False)
class Transfer:
    """A send or a receive on its way."""

    world: World
    ends: tuple[int, int]
    ended: Callable[[], bool]
    done: bool = field(default=False)

    def wait(self) -> None:
        with self.world.changed:
            over = self.world.changed.wait_for(lambda: self.ended() or self.world.dead & {*self.ends}, PATIENCE_S)
            if not over:
                raise RuntimeError(f"Timed out between {self.ends}")
            if not self.done:
                raise RuntimeError(f"Connection closed by peer between {self.ends}")


class ThreadGroup:
    """The group as one rank has it."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world.size

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Transfer:
        transfer = Transfer(self._world, (self._rank, rank), lambda: transfer.done)
        transfer.tensor = tensors[0]
        with self._world.changed:
            self._world.sent[self._rank, rank, tag].append(transfer)
            self._world.changed.notify_all()
        return transfer

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Transfer:
        with self._world.changed:
            waiting = self._world.sent[rank, self._rank, tag]

        def ended() -> bool:
            if not transfer.done and waiting and not self._world.dead & {rank, self._rank}:
                sent = waiting.popleft()
                assert sent.tensor.numel() == tensors[0].numel()
                tensors[0].copy_(sent.tensor)
                sent.done = transfer.done = True
                self._world.changed.notify_all()
            return transfer.done

        transfer = Transfer(self._world, (rank, self._rank), ended)
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
