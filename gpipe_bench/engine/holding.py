"""Gradients that a copy may still be reading.

Autograd adds a gradient to another in place if there is no other reference to it. It does so on the compute stream, and
cannot know that a copy stream may still be reading: once a copy is issued, only the device knows when it ends. So the
thread that issues the copy of a gradient keeps a reference until the copy has ended or the backward pass is issued.
This costs no extra memory: ``record_stream`` keeps the memory for as long.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from gpipe_bench.engine.streams import Stream

__all__ = ["Holding", "at_end_of_backward"]


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the current backward pass ends.

    DistributedDataParallel and FSDP use the same private name; public would be a hook of the whole backward pass.
    """
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001 - see above


class Holding:
    """What the copies of one batch's backward pass are reading; used by all of its threads.

    Args:
        at_end: is given :meth:`clear`, to call it when the backward pass has been issued.
    """

    def __init__(self, at_end: Callable[[Callable[[], None]], None] = lambda _: None) -> None:
        self._at_end = at_end
        self._held: deque[tuple[torch.Event, list[Tensor]]] = deque()
        self._lock = threading.Lock()

    def keep(self, values: Sequence[Any], stream: Stream) -> None:
        """Hold the tensors among ``values`` until the work queued on ``stream`` so far is done."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        if stream is None or not tensors:
            return
        event = torch.Event(stream.device)
        event.record(stream)
        with self._lock:
            first = not self._held
            self._held.append((event, tensors))
            while self._held[0][0].query():
                self._held.popleft()
                if not self._held:
                    return
        if first:
            self._at_end(self.clear)

    def clear(self) -> None:
        """Let go of everything: autograd adds nothing any more."""
        with self._lock:
            self._held.clear()
