"""Copy and Wait: moving tensors between partitions without stalling their computation.

A copy between devices runs on the sender's current stream, with a barrier both ways against the receiver's current
stream. On the compute streams it therefore stalls both devices. With copy streams current on both sides the barrier
stays between those, and Wait ties them to the compute streams where data is really needed
(torchgpipe, arXiv 2004.09910, section 3.2.2):

    device j-1   compute  F(i,j-1) ──Wait─┐
                 copy                     └─ Copy ─┐
    device j     copy                              └─ Copy ─┐
                 compute                                    └─Wait── F(i,j)

Backward the same nodes run in mirror image. All of them must be made while the copy streams are current, because
autograd runs a node on the stream on which it was made, and makes that stream wait for every defined gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpipe_bench.engine.autograd import apply_lane, pass_through
from gpipe_bench.engine.holding import Holding
from gpipe_bench.engine.microbatch import Values
from gpipe_bench.engine.observer import Observer, Task, observed
from gpipe_bench.engine.streams import Stream, record_stream, use_stream, wait_stream

__all__ = ["TRANSFERS", "Endpoint", "Route", "copy", "move", "move_back", "wait"]

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
        holding: keeps gradients while they are copied.
    """

    kind: str
    source: Endpoint
    target: Endpoint
    microbatch: int
    partition: int
    transfer: str
    observer: Observer | None
    holding: Holding

    def task(self, kind: str, sender: Endpoint, receiver: Endpoint) -> Task:
        """The task that an observer sees."""
        lane = "copy" if sender.copying != sender.computing else "compute"
        start = sender.copying or receiver.copying
        end = receiver.copying if self.transfer == "host" else None
        return Task(kind, self.microbatch, self.partition, sender.device, start, lane, end)


class Copy(Function):
    """(route, phony or None, values...) -> values on the target device.

    The phony, if any, is the end of a lane (see :mod:`gpipe_bench.engine.dependency`): its Fork runs backward once
    the gradient copy was issued.
    """

    @staticmethod
    def forward(ctx: Any, route: Route, phony: Tensor | None, *values: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.route = route
        moved = move(route, values)
        _mark_frozen(ctx, moved, ctx.needs_input_grad[2:])
        return moved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        route: Route = ctx.route
        moved = move_back(route, grads)
        if route.target.copying != route.target.computing:
            route.holding.keep(grads, route.target.copying)
        return (None, None, *moved)


class Wait(Function):
    """(waiter, awaited, values...) -> values, on the copy stream among the two.

    Backward the streams change places, and autograd itself makes the one wait for the other: for every defined gradient
    the stream of the node that takes it waits for the stream of the node that gave it (pytorch#151079, since 2.8).
    """

    @staticmethod
    def forward(ctx: Any, waiter: Stream, awaited: Stream, *values: Any) -> tuple[Any, ...]:
        wait_stream(waiter, awaited)
        passed = pass_through(ctx, values)
        _mark_frozen(ctx, passed, ctx.needs_input_grad[2:])
        return passed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *grads)


def copy(route: Route, values: Values, phony: Tensor | None = None) -> Values:
    """Move ``values`` along ``route``; what is no tensor stays as it is."""
    with use_stream(route.source.copying), use_stream(route.target.copying):
        return apply_lane(Copy, route, phony, *values)


def move(route: Route, values: Sequence[Any]) -> Values:
    """Move ``values`` along ``route``, outside any graph."""
    return _move(route, route.kind, route.source, route.target, values)


def move_back(route: Route, grads: Sequence[Any]) -> Values:
    """Move the gradients of what was moved along ``route`` to where it came from."""
    return _move(route, f"{route.kind}_grad", route.target, route.source, grads)


def wait(waiter: Stream, awaited: Stream, values: Values, current: Stream) -> Values:
    """Make ``waiter`` wait for ``awaited``, and ``awaited`` for ``waiter`` when the gradients of ``values`` pass.

    Args:
        waiter: the stream that waits in the forward pass.
        awaited: the stream that it waits for, another one.
        values: what is passed on.
        current: the copy stream among the two, current while the node is made.
    """
    with use_stream(current):
        return apply_lane(Wait, waiter, awaited, *values)


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


def _mark_frozen(ctx: Any, outputs: Sequence[Any], needs_grad: Sequence[bool]) -> None:
    """A tensor that needs no gradient on one side of a node needs none on the other."""
    frozen = [
        output for output, needed in zip(outputs, needs_grad, strict=True) if isinstance(output, Tensor) and not needed
    ]
    ctx.mark_non_differentiable(*frozen)
