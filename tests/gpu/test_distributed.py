"""Pipelines across processes on accelerators: two processes on one over gloo, two on two over NCCL."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from gpipe_bench import GPipe
from gpipe_bench.distributed import PeerError, Pipe
from tests.distributed.ranks import run_processes
from tests.gpu.support import LATE_BALANCE, late_batch, late_model

GLOO, NCCL = "gloo", "cpu:gloo,cuda:nccl"
SCHEDULES = {"gpipe": [4, 4], "1f1b": [4, 4], "zb_h1": [4, 4], "zb_v": LATE_BALANCE, "interleaved": LATE_BALANCE}


def steps(pipe, device):
    """Loss and gradients of three steps."""
    found = []
    for _ in range(3):
        pipe.zero_grad()
        loss = pipe.step(late_batch(device), late_batch(device).detach(), functional.mse_loss)
        found.append((loss.cpu(), {name: each.grad.clone().cpu() for name, each in pipe.named_parameters()}))
    return found


def job(rank, backend, devices, schedule, own_stream):
    device = torch.device(devices[rank])
    torch.accelerator.set_device_index(device.index)
    pipe = Pipe(
        late_model(), SCHEDULES[schedule], schedule=schedule, group=dist.new_group(backend=backend), device=device,
        chunks=4, checkpoint="always",
    )  # fmt: skip
    with torch.Stream(device) if own_stream else nullcontext():
        found = steps(pipe, device)
        norm = pipe.clip_grad_norm_(0.1)
    return found, norm.cpu()


def assert_as_in_one_process(tmp_path, *arguments):
    results = run_processes(2, tmp_path, job, *arguments)
    schedule = arguments[2]
    balance = SCHEDULES[schedule]
    one = GPipe(late_model(), balance, devices=["cpu"] * 2, schedule=schedule, chunks=4, checkpoint="always")
    for number, (loss, grads) in enumerate(steps(one, torch.device("cpu"))):
        merged = {name: grad for found, _ in results for name, grad in found[number][1].items()}
        torch.testing.assert_close([found[number][0] for found, _ in results], [loss] * 2)
        torch.testing.assert_close(merged, grads)
    norm = torch.nn.utils.get_total_norm([each.grad for each in one.parameters()])
    torch.testing.assert_close([norm_there for _, norm_there in results], [norm] * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_processes_on_one_device_through_host_memory(schedule, own_stream, device, tmp_path):
    assert_as_in_one_process(tmp_path, GLOO, [str(device)] * 2, schedule, own_stream)


@pytest.mark.multigpu
@pytest.mark.parametrize("backend", [GLOO, NCCL])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_processes_on_two_devices(schedule, backend, pair, tmp_path):
    if backend == NCCL and not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    assert_as_in_one_process(tmp_path, backend, [str(device) for device in pair], schedule, True)


def failing(rank, backend, devices):
    device = torch.device(devices[rank])
    torch.accelerator.set_device_index(device.index)
    pipe = Pipe(late_model(), [4, 4], group=dist.new_group(backend=backend), device=device, chunks=4, timeout_s=30)

    def fail(*_):
        raise ArithmeticError("on the second device")

    if rank == 1:
        pipe[2].register_forward_pre_hook(fail)
    try:
        pipe.step(late_batch(device), late_batch(device).detach(), functional.mse_loss)
    except (ArithmeticError, PeerError) as error:
        torch.accelerator.synchronize(device)
        return str(error)


@pytest.mark.multigpu
@pytest.mark.parametrize("backend", [GLOO, NCCL])
def test_a_failure_ends_both_processes_and_what_waits_on_their_devices(backend, pair, tmp_path):
    if backend == NCCL and not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    first, second = run_processes(2, tmp_path, failing, backend, [str(device) for device in pair])
    assert second == "on the second device"
    assert "rank 1 failed at F(" in first
