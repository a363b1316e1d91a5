"""Makes visible in a trace how host threads depend on each other, while the engine runs.

    thread A                       thread B
    box.put(x)   signal 7   ───►   box.get()      await 7
    start()      signal 8   ───►   begins         await 8
    join()       await 9    ◄───   ends           signal 9
    loss.backward()                backward 10 ... backward_end 10, around what autograd's threads do

A trace has the order in which each thread issued its work. In virtual time, a thread may go on at another moment than
on the host that ran it. Only these rows tell on which other threads it must wait.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from types import GenericAlias
from typing import Any, Final

from torch.autograd import Variable

from gpipe_bench.emulator.library import backend

_ENGINE: Final = "gpipe_bench.engine"
_PLAIN: Final = queue.SimpleQueue
_QUEUES: Final = (queue.Queue, queue.LifoQueue, queue.PriorityQueue)


@contextmanager
def seen() -> Iterator[None]:
    """Put hand-overs into the trace: queues, threads that start and end, futures, events of threading, backward passes.

    A ``SimpleQueue`` counts if it was made in the block. Backward passes inside others count, too.
    """
    with ExitStack() as changes:
        for name, module in list(sys.modules.items()):
            if name.startswith(_ENGINE) and vars(module).get("SimpleQueue") is _PLAIN:
                changes.enter_context(replaced(module, "SimpleQueue", _SimpleQueue))
        changes.enter_context(replaced(queue, "SimpleQueue", _SimpleQueue))
        for owner, name, around in (
            *((kind, name, around) for kind in _QUEUES for name, around in (("_put", _put), ("_get", _get))),
            (queue.Queue, "task_done", _before("_done")),
            (queue.Queue, "join", _after("_done")),
            (threading.Thread, "start", _start),
            (threading.Thread, "join", _join),
            (threading.Event, "set", _before("_set")),
            (threading.Event, "wait", _after("_set")),
            (Future, "set_result", _before("_end")),
            (Future, "set_exception", _before("_end")),
            (Future, "result", _after("_end")),
        ):
            changes.enter_context(replaced(owner, name, _around(getattr(owner, name), around)))
        engine = _Engine(Variable._execution_engine)  # noqa: SLF001 - where PyTorch's Python calls its engine
        changes.enter_context(replaced(Variable, "_execution_engine", engine))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value in the block."""
    plain = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def _around(plain: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls ``around`` with the plain method first."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(plain, self, *args, **kwargs)

    return method


class _SimpleQueue:
    """As ``queue.SimpleQueue``; what passes it brings the version of its signal along."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[tuple[int, Any]] = _PLAIN()

    def __class_getitem__(cls, item: Any) -> GenericAlias:
        return GenericAlias(cls, item)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        del block, timeout  # a queue without limit never blocks
        entries = [(backend().vd_signal(), item)]
        # The thread that takes the item is the last to hold it, as with a plain queue: it frees the item's memory.
        del item
        self._items.put(entries.pop())

    def put_nowait(self, item: Any) -> None:
        self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        version, item = self._items.get(block, timeout)
        backend().vd_await(version)
        return item

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return self._items.empty()

    def qsize(self) -> int:
        return self._items.qsize()


def _before(name: str) -> Callable[..., Any]:
    """A method that signals before it runs; ``name``: where the object keeps the versions."""

    def around(plain: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        if not vars(owner).get("_left_out"):
            vars(owner).setdefault(name, []).append(backend().vd_signal())
        return plain(owner, *args, **kwargs)

    return around


def _after(name: str) -> Callable[..., Any]:
    """A method that awaits all signals so far after it has run, unless it timed out."""

    def around(plain: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(owner, *args, **kwargs)
        if result is not False:
            for version in tuple(vars(owner).get(name, ())):
                backend().vd_await(version)
        return result

    return around


def _put(plain: Any, box: Any, item: Any) -> None:
    # By identity, as queues give items out in several orders.
    vars(box).setdefault("_versions", {}).setdefault(id(item), deque()).append(backend().vd_signal())
    plain(box, item)


def _get(plain: Any, box: Any) -> Any:
    item = plain(box)
    # An item from before the block has no version.
    if versions := vars(box).get("_versions", {}).get(id(item)):
        backend().vd_await(versions.popleft())
    return item


def _start(plain: Any, thread: threading.Thread) -> None:
    # On the thread itself: its class may have a run of its own.
    vars(thread)["run"] = partial(_run, thread, thread.run, backend().vd_signal())
    # The thread tells its caller that it has started: no work depends on that.
    vars(thread._started)["_left_out"] = True  # type: ignore[attr-defined,index]  # noqa: SLF001 - private
    plain(thread)


def _run(thread: threading.Thread, plain: Callable[[], None], begins: int) -> None:
    backend().vd_await(begins)
    try:
        plain()
    finally:
        vars(thread)["_ends"] = backend().vd_signal()
        vars(thread).pop("run", None)


def _join(plain: Any, thread: threading.Thread, timeout: float | None = None) -> None:
    plain(thread, timeout)
    ends = vars(thread).get("_ends")
    if ends is not None and not thread.is_alive():
        backend().vd_await(ends)


class _Engine:
    """PyTorch's autograd engine, as its Python calls it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        version = backend().vd_backward()
        try:
            return self._engine.run_backward(*args, **kwargs)
        finally:
            backend().vd_backward_end(version)
