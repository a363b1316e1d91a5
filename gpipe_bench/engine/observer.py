"""What an observer of the engine sees: every task, as the host issues it.

The engine calls an observer only while one is installed (:meth:`GPipe.observe`); otherwise a task costs one
comparison with None. Observers run in the thread that issues the task, so they must be quick and thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gpipe_bench.autograd.microbatch import Values

GivenT = TypeVar("GivenT", bound=Values | None)


@dataclass(frozen=True, slots=True)
class Task:
    """One task of the engine.

    Attributes:
        kind: one of :data:`gpipe_bench.results.timeline.KINDS`.
        microbatch: i.
        partition: j; a copy's is the one it arrives at, a gradient copy's the one it leaves.
        device: the device that runs it; a copy's is the sender.
        stream: the stream it runs on; None on a device without streams.
        lane: ``compute`` or ``copy``: whether that is a compute stream or a copy stream.
        end_stream: the stream that its last work runs on, where that is another one: the receiver's, for a copy that
            is staged through host memory.
    """

    kind: str
    microbatch: int
    partition: int
    device: torch.device
    stream: torch.Stream | None
    lane: str
    end_stream: torch.Stream | None = None


class Observer(Protocol):
    """Sees tasks begin and end on the host."""

    def start(self, task: Task) -> Any:
        """The host is about to issue ``task``; what is returned comes back to :meth:`finish`."""

    def finish(self, token: Any, nbytes: int) -> None:
        """The host has issued the task's last piece of work.

        The end of a backward pass that is not checkpointed is known only piece by piece: then this is called
        repeatedly with one token, and the last call counts.

        Args:
            token: what :meth:`start` returned.
            nbytes: bytes that a copy moved or that a forward pass produced; 0 for a backward pass.
        """


def tensor_bytes(values: Sequence[Any]) -> int:
    """Bytes of the tensors among ``values``."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def observed(
    observer: Observer | None, name: Callable[..., Task], of: tuple[Any, ...], job: Callable[..., GivenT], *args: Any
) -> GivenT:
    """Run ``job(*args)`` and report that as the task ``name(*of)``, with the bytes of the values that it returns."""
    if observer is None:
        return job(*args)
    token, nbytes = observer.start(name(*of)), 0
    try:
        given = job(*args)
        nbytes = 0 if given is None else tensor_bytes(given)
    finally:
        observer.finish(token, nbytes)
    return given
