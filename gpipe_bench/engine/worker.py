"""Workers: the threads that issue the tasks of a clock-cycle, one per device (the CPU counts once per partition).

With Fork and Join, workers outlive a step. Without them the order of the backward pass comes from autograd's
sequence numbers, which are thread-local: in the published runs every forward pass had fresh threads, whose numbers
start at zero, below those of the calling thread. So without Fork and Join a forward pass gets fresh workers, and shows
the same order in its first step and in its thousandth.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["Result", "Workers"]

Result = tuple[Any, BaseException | None]
_Job = Callable[[], Any] | None


def _serve(inbox: SimpleQueue[_Job], outbox: SimpleQueue[Result]) -> None:
    while True:
        job = inbox.get()
        if job is None:
            return
        try:
            result: Result = job(), None
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the calling thread
            result = None, error
        # Nothing of a finished task may stay alive until the next one comes.
        job = None
        outbox.put(result)
        del result


class Workers:
    """A fixed number of threads, each with a queue for jobs and one for results.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._pid = os.getpid()
        self._inboxes: list[SimpleQueue[_Job]] = [SimpleQueue() for _ in range(count)]
        self._outboxes: list[SimpleQueue[Result]] = [SimpleQueue() for _ in range(count)]
        for index, queues in enumerate(zip(self._inboxes, self._outboxes, strict=True)):
            threading.Thread(target=_serve, args=queues, name=f"gpipe-worker-{index}", daemon=True).start()
        self._finalizer = weakref.finalize(self, _dismiss, self._inboxes)

    @property
    def alive(self) -> bool:
        """Whether the threads exist in this process: a fork copies this object, not them."""
        return self._finalizer.alive and self._pid == os.getpid()

    def submit(self, index: int, job: Callable[[], Any]) -> None:
        """Hand a job to worker ``index``; jobs of one worker run in order."""
        self._inboxes[index].put(job)

    def collect(self, index: int) -> Result:
        """The next result of worker ``index``: (value, None) or (None, exception)."""
        return self._outboxes[index].get()

    def close(self) -> None:
        """Let the threads end when they have finished their jobs."""
        self._finalizer()


def _dismiss(inboxes: list[SimpleQueue[_Job]]) -> None:
    for inbox in inboxes:
        inbox.put(None)
