"""Workers: the threads that issue the tasks of a batch, one per device (the CPU counts once per partition).

For ``backward='autograd'`` they live for one forward pass. Autograd's sequence numbers are thread-local and only grow,
and the order of the backward pass hangs on them: fresh threads begin at zero, so that the thousandth step runs in the
order of the first. For ``backward='scheduled'`` no order hangs on them, and a :class:`WorkerPool` keeps them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch

__all__ = ["Result", "WorkerPool", "Workers", "result_of", "working"]

Result = tuple[Any, BaseException | None]
_Job = Callable[[], Any] | None


class Workers:
    """Threads with a queue for jobs and one for results each; see :func:`working`."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._inboxes: dict[int, SimpleQueue[_Job]] = {index: SimpleQueue() for index in indices}
        self._outboxes: dict[int, SimpleQueue[Result]] = {index: SimpleQueue() for index in indices}
        self._threads = []
        for index, inbox in self._inboxes.items():
            name = f"gpipe-worker-{index}"
            thread = threading.Thread(target=_serve, args=(inbox, self._outboxes[index]), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, index: int, job: Callable[[], Any]) -> None:
        """Hand a job to worker ``index``; jobs of one worker run in order."""
        self._inboxes[index].put(job)

    def collect(self, index: int) -> Result:
        """The next result of worker ``index``: (value, None) or (None, exception)."""
        return self._outboxes[index].get()

    def dismiss(self) -> None:
        """Let every thread end when it has finished its jobs."""
        for inbox in self._inboxes.values():
            inbox.put(None)

    def end(self) -> None:
        """Dismiss all threads, wait until they have finished, and drop the results that nobody took."""
        self.dismiss()
        for thread in self._threads:
            thread.join()
        # An exception among them leads to its thread's frames, and these to the outbox.
        for outbox in self._outboxes.values():
            while not outbox.empty():
                outbox.get()


class WorkerPool:
    """Workers that outlive a step; whoever borrows some has them alone, so that batches may overlap."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, ...], list[Workers]] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._inside = torch.get_num_threads()

    @contextmanager
    def lend(self, indices: Sequence[int]) -> Iterator[Workers]:
        """Workers for the block, one per index; after an exception they may be busy still, and are not lent again.

        A thread keeps the number of threads inside an operation with which it began: where the caller's is another one
        now, all begin anew.
        """
        key = tuple(indices)
        with self._lock:
            if self._process != os.getpid():  # threads do not come along into a forked process
                self._process = os.getpid()
                self._idle.clear()
            if self._inside != torch.get_num_threads():
                self._inside = torch.get_num_threads()
                self._dismiss()
            inside, idle = self._inside, self._idle.setdefault(key, [])
            workers = idle.pop() if idle else Workers(key)
        try:
            yield workers
        except BaseException:
            workers.dismiss()
            raise
        with self._lock:
            if inside == self._inside:
                self._idle.setdefault(key, []).append(workers)
            else:
                workers.dismiss()

    def __del__(self) -> None:
        self._dismiss()

    def _dismiss(self) -> None:
        for idle in self._idle.values():
            for workers in idle:
                workers.dismiss()
        self._idle.clear()


def result_of(job: Callable[[], Any]) -> Result:
    """Run a job; whatever it raises belongs to the calling thread, when that asks for the result."""
    try:
        return job(), None
    except BaseException as error:  # noqa: BLE001 - see above
        return None, error


@contextmanager
def working(indices: Sequence[int]) -> Iterator[Workers]:
    """Workers for the block, one per index."""
    workers = Workers(indices)
    try:
        yield workers
    finally:
        workers.dismiss()


def _serve(inbox: SimpleQueue[_Job], outbox: SimpleQueue[Result]) -> None:
    # OpenMP counts its threads per host thread, and a new one would use every core: asking makes PyTorch set its own
    # number here too.
    torch.get_num_threads()
    while (job := inbox.get()) is not None:
        result = result_of(job)
        # Nothing of a finished task may stay alive until the next one comes.
        job = None
        outbox.put(result)
        del result
