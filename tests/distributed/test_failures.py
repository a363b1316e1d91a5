"""What a rank that fails tells the others in words; that nothing waits for ever is tested by seeds (``seeds.py``)."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench.distributed import PeerError, Pipe
from gpipe_bench.distributed.failures import FailureChannel
from gpipe_bench.errors import DeviceCountError
from tests.distributed.test_parity import ranks_of
from tests.distributed.virtual import run_ranks


class BoomError(Exception):
    pass


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, burn):
        ctx.burn = burn
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.burn()
        return grad, None


class Layer(nn.Module):
    """Calls ``burn`` at its nth call, forward or backward."""

    def __init__(self, burn, number):
        super().__init__()
        self.linear, self.burn, self.left = nn.Linear(3, 3), burn, number

    def count(self):
        self.left -= 1
        if self.left == 0:
            self.burn()

    def forward(self, x):
        self.count()
        return torch.tanh(self.linear(Fuse.apply(x, self.count)))


def outcomes(schedule, partitions, place, number, burn, world=None):
    """What a step gives on each rank, if the layer at ``place`` burns."""

    def job(group):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(partitions)))
        layers[place] = Layer(burn, number)
        pipe = Pipe(layers, [1] * partitions, schedule=schedule, group=group, chunks=4, checkpoint="always")
        try:
            pipe.step(torch.rand(8, 3, requires_grad=True), torch.rand(8, 3), functional.mse_loss)
        except BaseException:
            with pytest.raises(PeerError, match="must run without failure, got "):
                pipe.step(torch.rand(8, 3), torch.rand(8, 3), functional.mse_loss)
            raise

    return run_ranks(ranks_of(schedule, partitions), job, world)


def test_a_device_that_one_rank_does_not_have():
    def job(group):
        layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        return Pipe(layers, [1, 1, 1], group=group, device="nonsense" if group.rank() == 1 else "cpu")

    results = run_ranks(3, job)
    assert isinstance(results.pop(1), ValueError)
    for result in results:
        assert isinstance(result, PeerError)
        assert "rank 1 failed: ValueError: device must be what PyTorch knows, got 'nonsense'" in str(result)


def test_another_number_of_processes():
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for result in run_ranks(3, lambda group: Pipe(copy.deepcopy(layers), [1, 1], group=group)):
        assert isinstance(result, DeviceCountError)
        assert "processes must be as many as the devices of the schedule, 2 for 2 partitions, got 3" in str(result)


def test_input_that_is_refused():
    def job(group):
        pipe = Pipe(nn.Sequential(*(nn.Linear(3, 3) for _ in range(2))), [1, 1], group=group, chunks=4)
        pipe.step("text" if group.rank() == 0 else None, torch.rand(8, 3), functional.mse_loss)

    refused, other = run_ranks(2, job)
    assert isinstance(refused, TypeError)
    assert "rank 0 failed: TypeError: input must be a tensor" in str(other)


def test_an_interrupt_while_the_reason_is_told(monkeypatch):
    """The others learn that the process is gone: its connections are closed all the same."""

    def interrupted(self, reason):
        if threading.current_thread().name == "rank-1" and "BoomError" in reason:
            raise KeyboardInterrupt
        return tell(self, reason)

    def burn():
        raise BoomError("by accident")

    tell = FailureChannel.tell
    monkeypatch.setattr(FailureChannel, "tell", interrupted)
    results = outcomes("1f1b", 3, 1, 3, burn)
    assert isinstance(results.pop(1), KeyboardInterrupt)
    assert all("rank 1 is gone or silent" in str(result) for result in results)


def test_a_default_device_without_numbers():
    """What is sent, and what it is sent with, stays in host memory, wherever the user makes tensors."""

    def job(group):
        pipe = Pipe(nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), [1, 1, 1], group=group, chunks=4)
        x, y = torch.rand(8, 3), torch.rand(8, 3)
        with torch.device("meta"):
            return [pipe.step(x, y, functional.mse_loss) for _ in range(3)]

    for result in run_ranks(3, job):
        assert isinstance(result, list), result
        assert all(loss.device.type == "cpu" and loss.isfinite() for loss in result)
