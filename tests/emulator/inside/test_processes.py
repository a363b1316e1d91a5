"""The streams of a pipeline across processes: threads are in their place, and each has a virtual device.

Messages go through pinned host memory, as over gloo, or from device to device, as over NCCL.
"""

from __future__ import annotations

import copy
import threading
from itertools import permutations
from queue import SimpleQueue
from typing import NamedTuple

import pytest
import torch

from gpipe_bench.distributed import Pipe, staging
from gpipe_bench.distributed.nccl import DeviceGroup
from gpipe_bench.emulator.library import devices
from gpipe_bench.emulator.races import find_races
from gpipe_bench.emulator.recording import recording
from gpipe_bench.schedules import SCHEDULES
from tests.distributed.test_parity import assert_equal, ranks_of, together, unet
from tests.distributed.threads import PATIENCE_S, run_ranks
from tests.engine.steps import scheduled

X = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
BATCHES = [X, X, X[:4]]
"""Messages of the first and the last one differ from those of the step before."""


class Sending:
    """A send on its way, after the work on the current stream; ``read`` is recorded when its tensor has been read."""

    def __init__(self, tensor):
        self.tensor, self.stream = tensor, torch.accelerator.current_stream(tensor.device)
        self.written = self.stream.record_event()
        self.received, self.read = threading.Event(), None

    def is_completed(self):
        if self.received.is_set():
            self.read.synchronize()
        return self.received.is_set()

    def wait(self):
        assert self.received.wait(PATIENCE_S)
        self.stream.wait_event(self.read)


class Receiving(NamedTuple):
    sent: SimpleQueue
    tensor: torch.Tensor

    def wait(self):
        """Receive on the current stream, before what it computes from now on."""
        sending = self.sent.get(timeout=PATIENCE_S)
        stream = torch.accelerator.current_stream(self.tensor.device)
        stream.wait_event(sending.written)
        self.tensor.copy_(sending.tensor)
        sending.read = stream.record_event()
        sending.received.set()


class OnStreams:
    """What is used of NCCL, for one rank."""

    def __init__(self, sent, rank):
        self.sent, self.rank = sent, rank

    def send(self, tensors, rank, tag):
        work = Sending(tensors[0])
        self.sent[self.rank, rank].put(work)
        return work

    def recv(self, tensors, rank, tag):
        return Receiving(self.sent[rank, self.rank], tensors[0])


def ranks_on_devices(schedule, model, *, direct):
    """Losses and gradients of some steps of the U-Net, and the races in it."""
    size = ranks_of(schedule, 4)
    ways = [{ends: SimpleQueue() for ends in permutations(range(size), 2)} for _ in range(2)]

    def job(group):
        rank, device = group.rank(), devices()[group.rank()]
        if direct:
            group = DeviceGroup(group, *(OnStreams(way, rank) for way in ways))
        pipe = Pipe(copy.deepcopy(model), [2] * 4, schedule=schedule, group=group, chunks=3, device=device)
        steps = together(pipe, [(x.to(device), x.to(device)) for x in BATCHES])
        return [(loss.cpu(), {name: grad.cpu() for name, grad in grads.items()}) for loss, grads in steps]

    with recording() as trace:
        results = run_ranks(size, job)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    merged = [
        (step[0][0], {name: grad for _, grads in step for name, grad in grads.items()})
        for step in zip(*results, strict=True)
    ]
    return merged, [str(race) for race in find_races(trace.records)]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_access_waits_for_those_before(schedule, direct):
    model = unet()
    one = scheduled(copy.deepcopy(model), [2] * 4, schedule, chunks=3, workers="never")
    found, races = ranks_on_devices(schedule, model, direct=direct)
    assert_equal(found, together(one, [(x, x) for x in BATCHES]))
    assert races == []


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("left_out", ["wait_stream", "record_stream"])
def test_no_wait_can_be_left_out(left_out, direct, monkeypatch):
    monkeypatch.setattr(staging, left_out, lambda *_: None)
    assert ranks_on_devices("1f1b", unet(), direct=direct)[1]
