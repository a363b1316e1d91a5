"""Turns of tasks, in a pipeline whose layers or loss PyTorch traces.

PyTorch traces a higher-order operator, such as ``torch.cond``, whenever it is called. It does so in global state, so no
other thread may trace or compile meanwhile. So all tasks of a pipeline that calls one take turns. The first task of
each partition, and the first loss, show whether it does; these take turns with each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from traceback import walk_tb

from gpipe_bench.engine.dispatch_mode import DispatchMode

# Files of PyTorch that trace, and what a compiled layer raises beside one that is traced.
_TRACING = ("/torch/_higher_order_ops/", "/torch/_dynamo/convert_frame.py")
_BESIDE = "using FX to symbolically trace"
_NOTE = (
    "PyTorch must trace and compile in one thread at a time, got an error while it did so, perhaps beside other "
    "partitions; use workers='never', or run the batch again: from now on partitions take turns. If PyTorch "
    "stays broken, begin a new process with workers='never'."
)


class Turns:
    """The turns of all batches of a pipeline, in one training mode.

    Args:
        threads: whether tasks run in threads of their own.
    """

    def __init__(self, *, threads: bool) -> None:
        self._threads, self._traced = threads, False
        self._seen: set[int] = set()
        self._lock = threading.RLock()

    def taken(self, place: int) -> bool:
        """Whether a task at ``place`` that begins now waits for its turn."""
        return self._traced or place not in self._seen

    @contextmanager
    def turn(self, place: int) -> Iterator[None]:
        """A block for a task of the partition with this index; the loss has the place after the last one."""
        with self._lock if self.taken(place) else nullcontext():
            watch = None if place in self._seen else DispatchMode()  # type: ignore[no-untyped-call]  # not annotated
            known = self._traced
            try:
                with watch or nullcontext():
                    yield
            except Exception as error:
                if self._threads and not known and _is_of_tracing(error):
                    self._traced = True
                    error.add_note(_NOTE)
                raise
            self._seen.add(place)
            self._traced |= watch is not None and watch.traced


def _is_of_tracing(error: BaseException) -> bool:
    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return _BESIDE in str(error) or any(each in file for each in _TRACING for file in files)
