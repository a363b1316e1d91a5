"""Why processes stop: what each tells all others before it closes its connections.

A wait that takes too long closes all connections of its group of processes. So news have connections of their own.

    rank 0 ── waits for ──► rank 1 ── waits for ──► rank 2, which tells nothing: the silent one
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor

from gpipe_bench.distributed.network import Group, Work

_TAG: Final = 2
_LONGEST: Final = 4096
"""Bytes of a piece of news."""
_WAITS: Final = "\1"
"""Before the ranks that a process waits for in vain; anything else is a reason."""


class LostError(Exception):
    """Another process has failed, is gone, or is silent."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__((str(error).splitlines() or [type(error).__name__])[0])
        self.silent = "Timed out" in str(self)


class FailureChannel:
    """What the processes of one or more groups tell each other when they stop.

    Args:
        groups: each with the ranks that its processes have in the whole job.
        patience_s: how long this process takes to tell, and then to hear.
        clock: gives the time in seconds.

    Attributes:
        rank: of this process in the whole job.
    """

    def __init__(
        self, groups: Sequence[tuple[Group, Sequence[int]]], patience_s: float, clock: Callable[[], float]
    ) -> None:
        # Two pieces of news may come from each: for whom it waits, and then the reason.
        self._peers: dict[int, tuple[Group, int, deque[tuple[Tensor, Work]]]] = {}
        self._patience_s, self._clock, self._told = patience_s, clock, 0
        for group, ranks in groups:
            self.rank = ranks[group.rank()]
            for peer, rank in enumerate(ranks):
                if rank != self.rank:
                    memory = torch.zeros(2, _LONGEST, dtype=torch.uint8, device="cpu")
                    news: deque[tuple[Tensor, Work]] = deque()
                    # One that is gone already tells nothing; one that goes after the first piece has told that.
                    with suppress(RuntimeError):
                        for piece in memory:
                            news.append((piece, group.recv([piece], peer, _TAG)))
                            self._peers[rank] = group, peer, news

    def tell(self, reason: str) -> None:
        """Tell all others why this process stops, unless they know, or, before they do, for whom it waits."""
        number = 1 if reason.startswith(_WAITS) else 2
        if self._told >= number:
            return
        self._told, works, end = number, [], self._clock() + self._patience_s
        data = torch.frombuffer(bytearray(reason.encode(errors="replace")[:_LONGEST]), dtype=torch.uint8)
        for group, peer, *_ in self._peers.values():
            with suppress(RuntimeError):
                works.append(group.send([data], peer, _TAG))
        for work in works:
            with suppress(RuntimeError):
                work.wait(self._left(end))

    def cause(self, ranks: Iterable[int], error: LostError) -> str:
        """Why a process does not answer.

        Args:
            ranks: one of these does not answer this process.
            error: what this process has noticed.

        Returns:
            The cause that another process told. If none did, the silent process at the end of the chain of waits.
        """
        ranks = [*ranks]
        if error.silent or len(ranks) > 1:
            # All that wait for the same one ask each other: those that tell that they wait are not the cause.
            self.tell(_WAITS + " ".join(map(str, ranks)))
        end = self._clock() + self._patience_s
        waiters = dict.fromkeys(ranks, self.rank)
        queue, lost = [*waiters], []
        for rank in queue:
            told = self._heard(rank, end)
            if told is None:
                lost.append(rank)
            elif not told.startswith(_WAITS):
                return told
            else:
                new = [each for each in map(int, told[1:].split()) if each not in waiters and each != self.rank]
                waiters |= dict.fromkeys(new, rank)
                queue += new
        # One that this process cannot ask is asked by the one that waits for it.
        for rank in dict.fromkeys(waiters[each] for each in lost if each not in self._peers):
            told = self._heard(rank, self._clock() + 2 * self._patience_s)
            if told is not None and not told.startswith(_WAITS):
                return told
        lost = lost or [self.rank]
        waiter = waiters.get(lost[0], queue[0])
        how = "silent, or waits for one that is" if error.silent or waiter != self.rank else "gone or silent"
        return f"{' or '.join(f'rank {each}' for each in lost)} is {how}, said rank {waiter}: {error}"

    def _heard(self, rank: int, end: float) -> str | None:
        """What another process tells until then; None if it tells nothing, or has no connection to this one."""
        _, _, news = self._peers.get(rank, (None, 0, ()))
        if not news:
            return None
        memory, work = news[0]
        try:
            work.wait(self._left(end))
        except RuntimeError:
            return None
        news.popleft()
        return memory.numpy().tobytes().rstrip(b"\0").decode(errors="replace")

    def _left(self, end: float) -> timedelta:
        return timedelta(seconds=max(end - self._clock(), 0.001))
