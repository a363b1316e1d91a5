"""Moving tensors between partitions without stalling their computation.

A copy between devices runs on the sender's current stream, with a barrier both ways against the receiver's current
stream. On the compute streams it therefore stalls both devices. With copy streams current on both sides the barrier
stays between those (torchgpipe, arXiv 2004.09910, section 3.2.2):

    device j-1   compute  F(i,j-1) ──wait─┐
                 copy                     └─ copy ─┐
    device j     copy                              └─ copy ─┐
                 compute                                    └─wait── F(i,j)

Autograd adds a gradient to another in place if there is no other reference to it. It does so on the compute stream, and
cannot know that a copy stream may still be reading: once a copy is issued, only the device knows when it ends. So the
thread that issues the copy of a gradient keeps a reference until the copy has ended or the backward pass is issued.
This costs no extra memory: ``record_stream`` keeps the memory for as long.

Streams are PyTorch's generic ``torch.Stream``. A device without streams (the CPU) has the stream None: waiting for it,
entering it or recording a tensor on it does nothing. So there is one path for CUDA, other accelerators and the CPU.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from gpipe_bench.autograd.microbatch import Values
from gpipe_bench.engine.observer import Observer, Task, observed

Stream = torch.Stream | None

_NOTHING = nullcontext()


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is queued on streams."""
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "Stream")


def current_stream(device: torch.device) -> Stream:
    """The stream that this thread currently uses on ``device``."""
    return torch.accelerator.current_stream(device) if has_streams(device) else None


@functools.cache
def shared_stream(device: torch.device, number: int, *, copying: bool = False) -> Stream:  # noqa: ARG001 - the key
    """A stream of ``device``, the same one for all pipelines of this process that ask for this number.

    Pipelines that are made one after another take no new streams, since libraries keep memory for each stream that they
    have worked on, such as the workspaces of cuBLAS. PyTorch has a pool of 32 streams for each priority, and more
    requests share them. Streams that copy have a priority, and so a pool, of their own: a copy on the compute stream of
    some partition would stall it.
    """
    if not has_streams(device):
        return None
    return torch.Stream(device, priority=-1 if copying else 0)


def use_stream(stream: Stream) -> AbstractContextManager[object]:
    """Make ``stream``, and its device, current in this thread for a block.

    ``with stream:`` would do so too, but a ``torch.Stream`` can be entered only once at a time (pytorch#176560, in 2.11
    at least), and here one stream is entered by several threads, and within itself.
    """
    return _NOTHING if stream is None else _using(stream)


@contextmanager
def _using(stream: torch.Stream) -> Iterator[None]:
    device, previous = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(previous)
        torch.accelerator.set_device_index(device)


def wait_stream(waiter: Stream, awaited: Stream) -> None:
    """Work queued on ``waiter`` from now on starts after everything queued on ``awaited`` so far."""
    if waiter is not None and awaited is not None and waiter != awaited:
        waiter.wait_stream(awaited)


def record_stream(tensor: Tensor, stream: Stream) -> None:
    """Tell the allocator that ``stream`` uses ``tensor``, which another stream allocated.

    Without it the memory could be handed out again, on the allocating stream, while ``stream`` still reads it.
    """
    if stream is not None and tensor.device.type == stream.device.type:
        tensor.record_stream(stream)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a copy: a device, the stream that copies there and the stream that computes there."""

    device: torch.device
    copying: Stream
    computing: Stream


@dataclass(frozen=True, slots=True)
class Route:
    """How micro-batch i travels to partition j.

    Attributes:
        kind: ``copy``, or ``portal`` for a skip.
        source: where the tensors are made.
        target: where they are used.
        microbatch: i.
        partition: j, where they arrive.
        transfer: ``direct``, or ``host`` for a copy staged through host memory.
        observer: told of each copy.
    """

    kind: str
    source: Endpoint
    target: Endpoint
    microbatch: int
    partition: int
    transfer: str
    observer: Observer | None

    def task(self, kind: str, sender: Endpoint, receiver: Endpoint) -> Task:
        """The task that an observer sees."""
        lane = "copy" if sender.copying != sender.computing else "compute"
        start = sender.copying or receiver.copying
        end = receiver.copying if self.transfer == "host" else None
        return Task(kind, self.microbatch, self.partition, sender.device, start, lane, end)


def move(route: Route, values: Sequence[Any]) -> Values:
    """Move ``values`` along ``route``; what is no tensor stays as it is."""
    return _move(route, route.kind, route.source, route.target, values)


def move_back(route: Route, grads: Sequence[Any], holding: Holding) -> Values:
    """Move gradients back along ``route``; ``holding`` keeps them while they are copied."""
    moved = _move(route, f"{route.kind}_grad", route.target, route.source, grads)
    if route.target.copying != route.target.computing:
        holding.keep(grads, route.target.copying)
    return moved


def _move(route: Route, kind: str, sender: Endpoint, receiver: Endpoint, values: Sequence[Any]) -> Values:
    staged = route.transfer == "host"

    def move_all() -> Values:
        return tuple(
            [_move_one(each, sender, receiver, staged) if isinstance(each, Tensor) else each for each in values]
        )

    with use_stream(sender.copying), use_stream(receiver.copying):
        if staged:
            # As a direct copy does by itself: it does not begin while the receiver has other things to do.
            wait_stream(sender.copying, receiver.copying)
        return observed(route.observer, route.task, (kind, sender, receiver), move_all)


def _move_one(tensor: Tensor, sender: Endpoint, receiver: Endpoint, staged: bool) -> Tensor:
    if staged:
        moved = _through_host(tensor, sender, receiver)
    else:
        # From a device to pageable host memory, a non-blocking copy would return before the data is there.
        moved = tensor.to(receiver.device, non_blocking="cpu" not in (tensor.device.type, receiver.device.type))
    # Made on the sender's compute stream and read on its copy stream; written on the receiver's copy stream and
    # read on its compute stream.
    if sender.copying != sender.computing:
        record_stream(tensor, sender.copying)
    if receiver.copying != receiver.computing:
        record_stream(moved, receiver.computing)
    return moved


def _through_host(tensor: Tensor, sender: Endpoint, receiver: Endpoint) -> Tensor:
    """Stage through host memory: pinned between devices with streams, which copy from it asynchronously."""
    pinned = sender.copying is not None and receiver.copying is not None
    host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    with use_stream(sender.copying):
        host.copy_(tensor, non_blocking=pinned)
    wait_stream(receiver.copying, sender.copying)
    if receiver.device.type == "cpu":
        return host
    with use_stream(receiver.copying):
        return host.to(receiver.device, non_blocking=pinned)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the current backward pass ends.

    DistributedDataParallel and FSDP use the same private name; public would be a hook of the whole backward pass.
    """
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001 - see above


class Holding:
    """What the copies of one batch's backward pass are reading; used by all of its threads.

    ``at_end`` is given :meth:`clear`, to call it when the backward pass has been issued.
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
