"""Moving tensors between partitions without stalling their computation.

A copy between devices runs on the sender's current stream, with a barrier both ways against the receiver's current
stream. On the compute streams it therefore stalls both devices. With copy streams current on both sides the barrier
stays between those (torchgpipe, arXiv 2004.09910, section 3.2.2):

    device j-1   compute  F(i,j-1) ──wait─┐
                 copy                     └─ copy ─┐
    device j     copy                              └─ copy ─┐
                 compute                                    └─wait── F(i,j)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpipe_bench.engine.microbatch import Values
from gpipe_bench.engine.observer import Observer, Task, observed
from gpipe_bench.engine.streams import Stream, record_stream, use_stream, wait_stream

__all__ = ["TRANSFERS", "Endpoint", "Route", "move", "move_back"]

TRANSFERS = ("direct", "host")


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


def move_back(route: Route, grads: Sequence[Any]) -> Values:
    """Move gradients back along ``route``, to the source of its tensors."""
    return _move(route, f"{route.kind}_grad", route.target, route.source, grads)


def _move(route: Route, kind: str, sender: Endpoint, receiver: Endpoint, values: Sequence[Any]) -> Values:
    staged = route.transfer == "host"
    with use_stream(sender.copying), use_stream(receiver.copying):
        if staged:
            # As a direct copy does by itself: it does not begin while the receiver has other things to do.
            wait_stream(sender.copying, receiver.copying)
        return observed(
            route.observer, route.task, (kind, sender, receiver), _move_all, values, sender, receiver, staged
        )


def _move_all(values: Sequence[Any], sender: Endpoint, receiver: Endpoint, staged: bool) -> Values:
    return tuple([_move_one(item, sender, receiver, staged) if isinstance(item, Tensor) else item for item in values])


def _move_one(tensor: Tensor, sender: Endpoint, receiver: Endpoint, staged: bool) -> Tensor:
    moved = _through_host(tensor, sender, receiver) if staged else _directly(tensor, receiver.device)
    # Made on the sender's compute stream and read on its copy stream; written on the receiver's copy stream and
    # read on its compute stream.
    if sender.copying != sender.computing:
        record_stream(tensor, sender.copying)
    if receiver.copying != receiver.computing:
        record_stream(moved, receiver.computing)
    return moved


def _directly(tensor: Tensor, device: torch.device) -> Tensor:
    # From a device to pageable host memory, a non-blocking copy would return before the data is there.
    return tensor.to(device, non_blocking="cpu" not in (tensor.device.type, device.type))


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
