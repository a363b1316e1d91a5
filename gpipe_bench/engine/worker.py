"""The threads of a batch: all of them are fresh, and end with it.

Autograd prefers the node that was made last *in its own thread*, so a fresh thread for each batch and each device
gives every batch the order of the first. Signals reach the main thread only. So the caller hands its batch to one fresh
thread, which starts, feeds and ends all others, and an interrupt of the caller finds no task half done.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from gpipe_bench.autograd.dispatch_mode import DispatchMode

T = TypeVar("T")
Result = tuple[Any, BaseException | None]


class ThreadState(threading.local):
    """What a thread works for.

    Attributes:
        locks: of the pipelines whose batches it works for. It must not wait for one of them: it would wait for itself.
    """

    locks: tuple[threading.Lock, ...] = ()


this_thread = ThreadState()


def new_thread(name: str, job: Callable[[], object]) -> threading.Thread:
    """A fresh thread for ``job``, which is yet to be started.

    It works for what this thread works for, and finds the values of ``contextvars`` that this thread has now.
    """
    locks = this_thread.locks
    if torch._C._autograd._profiler_enabled():  # noqa: SLF001 - it has no public name; False in a profile of all threads
        warnings.warn(
            "torch.profiler must profile all threads to see the layers of a pipeline, got a profile of this thread "
            "alone; pass experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True) to "
            "profile(), or make the pipeline with workers='never'",
            stacklevel=2,
        )

    def run() -> None:
        this_thread.locks = locks
        # OpenMP counts its threads per host thread, and a new one would use every core: asking makes PyTorch set its
        # own number here, too.
        torch.get_num_threads()
        job()

    return threading.Thread(target=copy_context().run, args=(run,), name=name, daemon=True)


def is_foreign_thread() -> bool:
    """Whether Python did not start this thread: so it is with the threads that autograd has for each accelerator."""
    return isinstance(threading.current_thread(), threading._DummyThread)  # noqa: SLF001 - Python has no other word on it


def result_of(job: Callable[[], Any]) -> Result:
    """(value, None) or (None, exception) of a job."""
    try:
        return job(), None
    except BaseException as error:  # noqa: BLE001 - it belongs to the thread that asks for the result
        return None, error


def raised(result: Result) -> Any:
    """The value of a result; raises its exception."""
    value, error = result
    if error is None:
        return value
    del result
    try:
        raise error
    finally:
        # Its traceback holds this frame, which must not hold it: the batch would stay until a garbage collection.
        del error


def in_fresh_thread(job: Callable[[], T], stop: Callable[[], None]) -> T:
    """Run ``job`` in a fresh thread and wait for it.

    ``stop`` is called if this thread is interrupted; the job must end soon after. Then the interrupt comes back, and
    nothing keeps the batch: a notebook holds the exception, and memory that its frames lead to is lost (pytorch#37726).
    """
    jobs = [job]
    del job
    outbox: SimpleQueue[Result] = SimpleQueue()

    def run() -> None:
        # The job is taken out before it runs: the thread keeps nothing of the batch for the moments in which it ends.
        while jobs:
            outbox.put(result_of(jobs.pop()))

    thread = new_thread("gpipe-batch", run)
    try:
        thread.start()
        results = [outbox.get()]
    except BaseException:
        stop()
        if thread.is_alive():
            thread.join()
        # Python keeps the object of a thread whose start did not end, and may start it yet (cpython#140746).
        jobs.clear()
        # An exception in there has a traceback, whose frames hold the outbox.
        while not outbox.empty():
            outbox.get()
        raise
    finished: T = raised(results.pop())
    return finished


class Workers:
    """Threads with a queue for jobs and one for results each, until :meth:`end`."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._inboxes: dict[int, SimpleQueue[Callable[[], Any] | None]] = {index: SimpleQueue() for index in indices}
        self._outboxes: dict[int, SimpleQueue[Result]] = {index: SimpleQueue() for index in indices}
        self._threads = [new_thread(f"gpipe-worker-{index}", partial(self._serve, index)) for index in indices]
        for thread in self._threads:
            thread.start()

    def submit(self, index: int, job: Callable[[], Any]) -> None:
        """Hand a job to worker ``index``; jobs of one worker run in order."""
        self._inboxes[index].put(job)

    def collect(self, index: int) -> Result:
        """The next result of worker ``index``."""
        return self._outboxes[index].get()

    def end(self) -> None:
        """Wait until every thread has done its jobs, and drop the results that were not collected."""
        for inbox in self._inboxes.values():
            inbox.put(None)
        for thread in self._threads:
            thread.join()
        for outbox in self._outboxes.values():
            # An exception among them leads to its thread's frames, and these to the outbox.
            while not outbox.empty():
                outbox.get()

    def _serve(self, index: int) -> None:
        inbox, outbox = self._inboxes[index], self._outboxes[index]
        while (job := inbox.get()) is not None:
            results = [result_of(job)]
            # Nothing of a finished task may stay alive here once its result is out: the thread that takes it frees it.
            job = None
            outbox.put(results.pop())


class Turns:
    """The turns of tasks in all batches of a pipeline, in one training mode, where its layers or loss need them.

    PyTorch traces a higher-order operator, such as ``torch.cond``, whenever it is called, in global state: no other
    thread may trace or compile meanwhile. The levels of forward-mode derivatives, as of ``torch.func.jvp``, are global,
    too. So all tasks of a pipeline that uses either take turns. The first task of each partition, and the first loss,
    show whether it does; these take turns with each other.

    Attributes:
        taken: whether all tasks take turns.
    """

    def __init__(self) -> None:
        self.taken = False
        self._seen: set[int] = set()
        self._lock = threading.RLock()

    @contextmanager
    def turn(self, j: int) -> Iterator[None]:
        """A block for a task of partition j; the loss counts as the one after the last."""
        if j in self._seen:
            with self._lock if self.taken else nullcontext():
                yield
            return
        with self._lock, DispatchMode() as watch:  # type: ignore[no-untyped-call]  # not annotated
            yield
        self._seen.add(j)
        self.taken |= watch.traced
