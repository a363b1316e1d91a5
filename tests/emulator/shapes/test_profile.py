"""A profile measured on virtual devices gives back the constants that say how long their kernels take.

The host is real, and so are PyTorch's streams, events and autograd; time is virtual. What only CUDA has is given here:
the device's properties, and a sleep, which in virtual time needs no length, since the host takes none.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
import yaml

from gpipe_bench.emulator.handovers import seen
from gpipe_bench.emulator.shapes import price_by
from gpipe_bench.machine.hardware import HardwareMachine
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.simulator.api import Model, simulate
from gpipe_bench.simulator.constants_fit import with_constants
from gpipe_bench.suite.running import device_profile
from tests.emulator.bed.ticking import ticking

UNET = Model("unet", {"depth": 2, "B": 1, "C": 64, "size": 192})
P40, H200 = (load_profile(name) for name in ("p40", "h200"))
OF_THE_HOST = {"launch_us", "lock", "parameter_us"}
REAL_EVENT = torch.Event
GIB = 2**30


class Event:
    """PyTorch's; the device that it is recorded on sleeps until all is queued."""

    def __init__(self, device, enable_timing):
        self._event = REAL_EVENT(device, enable_timing=enable_timing)

    def record(self):
        self._event.record()

    def query(self):
        return False

    def elapsed_time(self, other):
        return self._event.elapsed_time(other._event)


@pytest.fixture
def h200(monkeypatch):
    """Virtual devices as fast as an H200, with what only CUDA has."""

    @contextmanager
    def convolutions(*, tf32):
        price_by(H200 if tf32 else H200.adapted(tf32=False))
        yield

    with ExitStack() as clock, seen():

        def sleep(cycles):
            clock.close()
            clock.enter_context(ticking(HardwareMachine(H200), host_time=False))

        torch_of_cuda = {
            "_sleep": sleep,
            "get_device_properties": lambda _: SimpleNamespace(multi_processor_count=132),
            "get_device_capability": lambda _: (9, 0),
            "mem_get_info": lambda _: (120 * GIB, 140 * GIB),
            "memory_reserved": lambda _: 19 * GIB,
        }
        for name, value in torch_of_cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(device_profile, "_convolutions", convolutions)
        price_by(H200)
        yield
    price_by(P40)


def values(profile):
    return {name: constant.value for name, constant in profile.kernels.items() if name not in OF_THE_HOST}


def test_every_constant_is_found_again(h200, monkeypatch):
    slower = {name: 0.6 * value for name, value in values(H200).items() if name != "multiprocessors"}
    monkeypatch.setattr(device_profile, "known_profile", lambda _: with_constants(H200, slower))
    found = device_profile.measure_profile("virtual:0", "mine")
    assert found.failures == {}
    # What is assumed before counts a little.
    assert values(found.profile) == pytest.approx(values(H200), rel=0.01)
    origins = {name: constant.origin for name, constant in found.profile.kernels.items()}
    assert {name for name, origin in origins.items() if origin != "measured"} == {"multiprocessors"}
    assert max(map(abs, found.errors.values())) < 0.01
    assert found.profile.capacity_bytes == 139 * GIB
    for way, link in (("host", "pcie"), ("within", "nvlink")):
        assert found.profile.links[way].gb_per_s == pytest.approx(H200.links[link].gb_per_s, rel=1e-3)
        assert found.profile.links[way].latency_us == pytest.approx(H200.links[link].latency_us, rel=1e-3)


def test_a_device_that_nobody_knows_is_simulated_as_fast_as_it_is(h200, tmp_path):
    text = yaml.safe_load(device_profile.measure_profile("virtual:0", "mine").text)
    # What depends on how busy this machine is.
    text["kernels"] |= {name: H200.kernels[name].model_dump() for name in OF_THE_HOST if name in H200.kernels}
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump(text))
    for precision in ("float32", "bfloat16"):
        times = [
            simulate(UNET, balance=[29], batch_size=64, precision=precision, profile=profile).step_time_ms
            for profile in (mine, "h200")
        ]
        assert times[0] == pytest.approx(times[1], rel=0.01)
