"""A step that is bound by the host says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench.machine.constants import Constant
from gpipe_bench.machine.profile import Profile, load_profile
from gpipe_bench.simulator import simulate

H200 = load_profile("h200")


def step(width, profile="h200", **options):
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        sample = torch.empty(1, width)
    return simulate(layers, balance=[4], batch_size=64, sample=sample, profile=profile, memory=False, **options)


def test_small_layers_wait_for_the_host():
    small = step(16)
    assert small.bound_by_host
    assert small.host_fraction > 0.95


def test_a_host_that_is_twice_as_slow_takes_twice_the_time():
    assert step(16, launch_us=2 * H200.host_us).step_time_ms == pytest.approx(2 * step(16).step_time_ms, rel=0.01)


def pipeline(devices, lock):
    constants = {**H200.kernels, "lock": Constant(value=lock, origin="assumed")}
    profile = Profile(**{**H200.settings, "kernels": constants})
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    options = {"balance": [4, 4], "batch_size": 64, "chunks": 8, "schedule": "gpipe", "memory": False}
    return simulate(layers, sample=torch.empty(1, 16, device="meta"), profile=profile, devices=devices, **options)


def test_threads_of_two_devices_are_bound_by_the_interpreter_that_they_share():
    locked, half = (pipeline((0, 1), lock) for lock in (1, 0.5))
    assert locked.step_time_ms > 1.4 * half.step_time_ms
    assert locked.bound_by_host


def test_partitions_of_one_device_have_one_thread():
    step = pipeline((0, 0), 1)
    assert step.bound_by_host
    assert step.step_time_ms == pipeline((0, 0), 2).step_time_ms


def test_a_pipeline_waits_for_the_host_whatever_its_bubble():
    step = pipeline((0, 1), 0.01)
    assert step.host_fraction < 0.95
    assert step.host_fraction > step.kernel_fraction
    assert step.bound_by_host


def test_both_parts_of_a_backward_pass_are_launched():
    """Layer normalisation launches its backward pass twice if it is split: for its inputs, and for its weights."""
    with torch.device("meta"):
        layers, sample = nn.Sequential(*(nn.LayerNorm(16) for _ in range(4))), torch.empty(1, 16)
    options = {"balance": [2, 2], "batch_size": 64, "chunks": 4, "checkpoint": "never", "sample": sample}
    options |= {"memory": False, "profile": "h200"}
    whole, split = (simulate(layers, schedule=name, **options) for name in ("looped_bfs", "zb_v"))
    assert split.step_time_ms > 1.1 * whole.step_time_ms
    assert whole.host_fraction == split.host_fraction == 1


def test_large_layers_do_not():
    assert not step(8192).bound_by_host
    assert 0 < step(8192).host_fraction < 0.95


def test_recomputation_is_launched_too():
    assert step(16, checkpoint="always").step_time_ms > 1.05 * step(16, checkpoint="never").step_time_ms


def measured(name="mine", origin="measured"):
    own = Constant(value=9.0, origin=origin)
    return Profile(**{**H200.settings, "name": name, "kernels": {**H200.kernels, "launch_us": own}})


@pytest.mark.parametrize("width", [16, 8192])
def test_a_step_that_a_host_bounds_which_nobody_measured_says_so(width):
    guessed = [
        step(width),
        step(width, profile="p40"),
        step(width, profile=measured("h200")),
        step(width, profile=measured(origin="assumed")),
    ]
    known = [step(width, launch_us=30), step(width, profile=measured())]
    for one in guessed:
        assert [caveat.partition(":")[0] for caveat in one.caveats] == ["the time is a guess"] * one.bound_by_host
    assert not any(one.caveats for one in known)
    assert guessed[0].bound_by_host == known[0].bound_by_host == (width == 16)


def convolutions(**options):
    with torch.device("meta"):
        three = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
        blocks = (nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(5))
        layers = nn.Sequential(*three, *(layer for block in blocks for layer in block))
        sample = torch.empty(1, 3, 64, 64)
    return simulate(layers, **{"balance": [9, 9], "batch_size": 64, "chunks": 8, "sample": sample, **options})


def test_reserved_memory_that_had_not_settled_is_told():
    short, longer, settled = (convolutions(steps=steps) for steps in (2, 4, 8))
    told = convolutions()
    assert short.peak_reserved_gib < longer.peak_reserved_gib == settled.peak_reserved_gib
    assert (told.peak_reserved_gib, told.later_reserved_gib) == (short.peak_reserved_gib, longer.peak_reserved_gib)
    assert "reserved memory has not settled" in told.caveats[-1]
    assert convolutions(balance=[18], chunks=1, checkpoint="never").later_reserved_gib is None
    assert convolutions(memory=False).later_reserved_gib is None
