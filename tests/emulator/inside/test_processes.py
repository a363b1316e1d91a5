"""The streams of a pipeline across processes: threads are in their place, and each has a virtual device.

Messages go through pinned host memory, as over gloo, or from device to device, as over NCCL.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from gpipe_bench.distributed import Pipe, staging
from gpipe_bench.distributed.nccl import DeviceGroup
from gpipe_bench.emulator.library import devices
from gpipe_bench.emulator.races import find_races
from gpipe_bench.emulator.trace import recording
from gpipe_bench.schedules import SCHEDULES
from tests.distributed.test_parity import assert_equal, ranks_of, together, unet
from tests.distributed.threads import ThreadGroup, World, run_ranks
from tests.engine.steps import scheduled

X = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)


class Ended(NamedTuple):
    transfer: object
    ended: Callable[[], None]

    def wait(self):
        self.transfer.wait()
        self.ended()


class OnStreams(ThreadGroup):
    """As NCCL, without its host that goes on: transfers come after and before the work of both current streams."""

    def send(self, tensors, rank, tag):
        stream = torch.accelerator.current_stream(tensors[0].device)
        tensors[0].written = stream.record_event()
        transfer = super().send(tensors, rank, tag)
        return Ended(transfer, lambda: stream.wait_event(transfer.tensor.read))

    def recv(self, tensors, rank, tag):
        stream = torch.accelerator.current_stream(tensors[0].device)
        transfer = super().recv(Filled(tensors[0], stream), rank, tag)
        return Ended(transfer, lambda: None)


class Filled(list):
    """What a receive writes to, on its stream."""

    def __init__(self, tensor, stream):
        super().__init__([self])
        self.tensor, self.stream, self.numel = tensor, stream, tensor.numel

    def copy_(self, sent):
        self.stream.wait_event(sent.written)
        with staging.use_stream(self.stream):
            self.tensor.copy_(sent)
        sent.read = self.stream.record_event()


def ranks_on_devices(schedule, model, *, direct):
    """Loss and gradients of a step of the U-Net, and the races in it."""
    size = ranks_of(schedule, 4)
    worlds = [World(size) for _ in range(3)]

    def job(group):
        rank, device = group.rank(), devices()[group.rank()]
        if direct:
            group = DeviceGroup(group, *(OnStreams(world, rank) for world in worlds[1:]))
        pipe = Pipe(copy.deepcopy(model), [2] * 4, schedule=schedule, group=group, chunks=3, device=device)
        ((loss, grads),) = together(pipe, [(X.to(device), X.to(device))])
        return loss.cpu(), {name: grad.cpu() for name, grad in grads.items()}

    with recording() as trace:
        results = run_ranks(size, job, worlds[0])
    for result in results:
        if isinstance(result, BaseException):
            raise result
    merged = {name: grad for _, grads in results for name, grad in grads.items()}
    return results[0][0], merged, [str(race) for race in find_races(trace.records)]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_access_waits_for_those_before(schedule, direct):
    model = unet()
    expected = together(scheduled(copy.deepcopy(model), [2] * 4, schedule, chunks=3, workers="never"), [(X, X)])
    loss, grads, races = ranks_on_devices(schedule, model, direct=direct)
    assert_equal([(loss, grads)], expected)
    assert races == []


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("left_out", ["wait_stream", "record_stream"])
def test_no_wait_can_be_left_out(left_out, direct, monkeypatch):
    monkeypatch.setattr(staging, left_out, lambda *_: None)
    assert ranks_on_devices("1f1b", unet(), direct=direct)[2]
