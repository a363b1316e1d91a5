"""The streams of a pipeline across processes: threads are in their place, and each has a virtual device.

Messages go through pinned host memory, as over gloo, or from device to device, as over NCCL.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from math import inf
from typing import NamedTuple

import pytest
import torch

from gpipe_bench.distributed import Pipe, staging
from gpipe_bench.emulator.library import devices
from gpipe_bench.emulator.races import find_races
from gpipe_bench.emulator.recording import recording
from gpipe_bench.schedules import SCHEDULES
from tests.distributed.test_parity import assert_equal, ranks_of, together, unet
from tests.distributed.virtual import VirtualNetwork, run_ranks
from tests.engine.steps import scheduled

X = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
BATCHES = [X, X, X[:4]]
"""Messages of the first and the last one differ from those of the step before."""


class Sending:
    """A send on its way, after the work on the current stream; ``read`` is recorded when its tensor has been read."""

    def __init__(self, group, tensor):
        self.group, self.tensor, self.stream = group, tensor, torch.accelerator.current_stream(tensor.device)
        self.written, self.read = self.stream.record_event(), None

    def wait(self):
        self.group.world.wait(self.group.rank, lambda: self.read, inf)
        self.stream.wait_event(self.read)


class Receiving(NamedTuple):
    group: OnStreams
    sent: deque
    tensor: torch.Tensor

    def wait(self):
        """Receive on the current stream, before what it computes from now on."""
        self.group.world.wait(self.group.rank, lambda: self.sent, inf)
        sending = self.sent.popleft()
        stream = torch.accelerator.current_stream(self.tensor.device)
        stream.wait_event(sending.written)
        self.tensor.copy_(sending.tensor)
        sending.read = stream.record_event()


class OnStreams:
    """What is used of NCCL, for one rank."""

    def __init__(self, world, sent, rank):
        self.world, self.sent, self.rank = world, sent, rank

    def send(self, tensors, rank, tag):
        work = Sending(self, tensors[0])
        self.sent[self.rank, rank].append(work)
        return work

    def recv(self, tensors, rank, tag):
        return Receiving(self, self.sent[rank, self.rank], tensors[0])


class OverNccl(VirtualNetwork):
    """Ranks with NCCL for their devices."""

    def __init__(self, network, sent):
        super().__init__(network.world, network.ranks, network.own)
        self.sent = sent

    def has_nccl(self, device):
        return device.type != "cpu"

    def connected(self, way, store, timeout, *, nccl=False):
        return OnStreams(self.world, self.sent[way], self.own) if nccl else super().connected(way, store, timeout)


def ranks_on_devices(schedule, model, *, direct):
    """Losses and gradients of some steps of the U-Net, and the races in it."""
    size = ranks_of(schedule, 4)
    sent = defaultdict(lambda: defaultdict(deque))

    def job(group):
        device = devices()[group.rank()]
        if direct:
            group = OverNccl(group, sent)
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
