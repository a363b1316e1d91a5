"""Memory is counted per device and stream, and runs out when it should."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from gpipe_bench.emulator.library import capacity, devices
from gpipe_bench.emulator.recording import recording

DEVICE = devices(7)[-1]


@pytest.fixture(autouse=True)
def _nothing_left():
    gc.collect()
    assert torch.accelerator.memory_allocated(DEVICE) == 0
    torch.accelerator.reset_peak_memory_stats(DEVICE)


def test_bytes_in_use_and_their_peak():
    x = torch.ones(100, device=DEVICE)
    y = x + 1
    assert torch.accelerator.memory_allocated(DEVICE) == 800
    assert torch.accelerator.memory_stats(DEVICE)["allocation.all.current"] == 2
    del x
    assert torch.accelerator.memory_allocated(DEVICE) == 400
    assert torch.accelerator.max_memory_allocated(DEVICE) == 800
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    assert torch.accelerator.max_memory_allocated(DEVICE) == 400
    del y


def test_what_a_kernel_makes_is_counted_once_and_views_are_not():
    x = torch.ones(10, 10, device=DEVICE)
    parts = x.cumsum(0).chunk(2)
    assert torch.accelerator.memory_allocated(DEVICE) == 800
    del parts, x


def test_memory_belongs_to_the_stream_that_allocated_it():
    stream = torch.Stream(DEVICE)
    with recording() as trace:
        with stream:
            x = torch.empty(10, device=DEVICE)
        del x
    assert [(record.kind, record.stream) for record in trace.records] == [
        ("alloc", stream.stream_id),
        ("free", stream.stream_id),
    ]


def test_allocations_and_frees_are_on_record():
    with recording() as trace:
        x = torch.empty(10, device=DEVICE)
        del x
    assert [(record.kind, record.device, record.nbytes) for record in trace.records] == [
        ("alloc", 6, 40),
        ("free", 6, 40),
    ]
    assert trace.records[0].writes == trace.records[1].writes


def test_an_empty_tensor_takes_nothing():
    x = torch.empty(0, device=DEVICE)
    assert torch.accelerator.memory_stats(DEVICE)["allocation.all.current"] == 0
    assert x.device == DEVICE


@pytest.mark.parametrize("make", [lambda: torch.empty(26, device=DEVICE), lambda: torch.arange(26.0, device=DEVICE)])
def test_running_out_of_memory(make):
    with capacity(DEVICE, 100):
        x = torch.empty(25, device=DEVICE)
        del x
        with pytest.raises(torch.OutOfMemoryError, match=r"device 6 out of memory: .* 104 bytes with 0 of 100 in use"):
            make()
        assert torch.accelerator.memory_allocated(DEVICE) == 0
    assert make().numel() == 26


def test_a_kernel_whose_result_does_not_fit_runs_out_of_memory():
    x = torch.ones(4, 4, device=DEVICE)
    with capacity(DEVICE, 100), pytest.raises(torch.OutOfMemoryError):
        torch.linalg.svd(x)
    del x
    assert torch.accelerator.memory_allocated(DEVICE) == 0


def test_resizing_and_setting_storages():
    x = torch.arange(4.0, device=DEVICE)
    x.resize_(2, 3)
    assert x.cpu().flatten()[:4].tolist() == [0, 1, 2, 3]
    assert torch.accelerator.memory_allocated(DEVICE) == 24
    y = torch.empty(0, device=DEVICE).set_(x.untyped_storage(), 1, (2,), (2,))
    assert y.cpu().tolist() == [1, 3]
    out = torch.empty(0, device=DEVICE)
    torch.add(y, 1, out=out)
    assert out.cpu().tolist() == [2, 4]
    del x, y, out


def test_a_step_gives_back_what_it_took():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)
    held = torch.accelerator.memory_allocated(DEVICE)
    model(torch.ones(2, 8, device=DEVICE)).sum().backward()
    assert torch.accelerator.max_memory_allocated(DEVICE) > 2 * held
    model.zero_grad()
    assert torch.accelerator.memory_allocated(DEVICE) == held
