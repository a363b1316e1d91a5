"""Why processes stop: what each tells all others, once, before it closes its connections.

A wait that takes too long closes all connections of its group of processes. So news have connections of their own.

    rank 0 ── waits for ──► rank 1 ── waits for ──► rank 2, which tells nothing: the silent one
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor

from gpipe_bench.distributed.channel import Group, Work

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

    Attributes:
        rank: of this process in the whole job.
    """

    def __init__(self, groups: Sequence[tuple[Group, Sequence[int]]], patience_s: float) -> None:
        self._peers: dict[int, tuple[Group, int, Tensor, Work]] = {}
        self._patience_s, self._told = patience_s, False
        for group, ranks in groups:
            self.rank = ranks[group.rank()]
            for peer, rank in enumerate(ranks):
                if rank != self.rank:
                    memory = torch.zeros(_LONGEST, dtype=torch.uint8, device="cpu")
                    # One that is gone already tells nothing.
                    with suppress(RuntimeError):
                        self._peers[rank] = group, peer, memory, group.recv([memory], peer, _TAG)

    def tell(self, reason: str) -> None:
        """Tell all others why this process stops, unless it has told them before."""
        if self._told:
            return
        self._told, works, end = True, [], time.monotonic() + self._patience_s
        data = torch.frombuffer(bytearray(reason.encode(errors="replace")[:_LONGEST]), dtype=torch.uint8)
        for group, peer, *_ in self._peers.values():
            with suppress(RuntimeError):
                works.append(group.send([data], peer, _TAG))
        for work in works:
            with suppress(RuntimeError):
                work.wait(_left(end))

    def cause(self, ranks: Iterable[int], error: LostError) -> str:
        """Why a process does not answer.

        Args:
            ranks: one of these does not answer this process.
            error: what this process has noticed.

        Returns:
            The cause that another process told. If none did, the silent process at the end of the chain of waits.
        """
        if error.silent:
            self.tell(_WAITS + " ".join(map(str, ranks)))
        end = time.monotonic() + self._patience_s
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
        lost = lost or [self.rank]
        waiter = waiters.get(lost[0], queue[0])
        how = "silent, or waits for one that is" if error.silent or waiter != self.rank else "gone or silent"
        return f"{' or '.join(f'rank {each}' for each in lost)} is {how}, said rank {waiter}: {error}"

    def _heard(self, rank: int, end: float) -> str | None:
        """What another process tells until then; None if it tells nothing, or has no connection to this one."""
        if rank not in self._peers:
            return None
        *_, memory, work = self._peers[rank]
        try:
            work.wait(_left(end))
        except RuntimeError:
            return None
        return memory.numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def _left(end: float) -> timedelta:
    return timedelta(seconds=max(end - time.monotonic(), 0.001))
