"""Utilisation: a sampler whose source is given, and what happens without a driver."""

import threading

import pynvml
import pytest
import torch

from gpipe_bench.measure.nvml import device_handle, driver_version, nvml_session
from gpipe_bench.measure.utilization import NvmlUtilization, busy_share, nvml_probe
from gpipe_bench.results.breakdown import Breakdown


@pytest.fixture
def no_driver(monkeypatch):
    def refuse():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)


class Source:
    """A probe that gives these shares, the last one again and again, and tells when all were asked for."""

    def __init__(self, *shares):
        self.shares = list(shares)
        self.exhausted = threading.Event()

    def __call__(self):
        if len(self.shares) > 1:
            return self.shares.pop(0)
        self.exhausted.set()
        return self.shares[0]


def sampled(*probes):
    devices = [f"cuda:{index}" for index in range(len(probes))]
    with NvmlUtilization(devices, interval_s=0.0, probes=probes) as sampler:
        for probe in probes:
            assert probe is None or probe.exhausted.wait(timeout=60)
    return sampler


def test_samples_are_kept_in_order_for_each_device():
    sampler = sampled(Source(0.25, 0.75, 0.5), Source(1.0))
    assert sampler.samples[0][:3] == [0.25, 0.75, 0.5]
    assert set(sampler.samples[1]) == {1.0}


def test_means_per_device_and_over_devices():
    sampler = sampled(Source(0.5), Source(1.0))
    assert sampler.utilization_fractions == [0.5, 1.0]
    assert sampler.utilization_fraction == 0.75


def test_a_device_that_cannot_be_sampled_has_none_and_makes_no_mean():
    sampler = sampled(Source(0.5), None)
    assert sampler.utilization_fractions == [0.5, None]
    assert sampler.utilization_fraction is None


def test_a_reading_that_fails_is_left_out():
    assert set(sampled(Source(0.5, None, 0.5)).samples[0]) == {0.5}


def test_sampling_ends_with_the_block_also_after_an_exception():
    probe = Source(0.5)
    with pytest.raises(ZeroDivisionError), NvmlUtilization(["cuda:0"], interval_s=0.0, probes=[probe]) as sampler:
        raise ZeroDivisionError
    assert not any(thread.name == "utilization" for thread in threading.enumerate())
    assert sampler.samples[0]


def test_the_shortest_block_has_a_sample():
    with NvmlUtilization(["cuda:0"], interval_s=3600.0, probes=[Source(0.5)]) as sampler:
        pass
    assert sampler.samples == [[0.5]]


def test_without_a_driver_everything_is_none(no_driver):
    with NvmlUtilization(["cuda:0", "cpu"]) as sampler:
        pass
    assert sampler.utilization_fractions == [None, None]
    assert sampler.utilization_fraction is None
    assert driver_version() == ""


def test_without_a_driver_the_session_is_none(no_driver):
    with nvml_session() as nvml:
        assert nvml is None
        assert nvml_probe(nvml, torch.device("cuda", 0)) is None


def test_the_cpu_has_no_handle():
    assert device_handle(pynvml, torch.device("cpu")) is None


def test_sessions_close_what_they_opened(monkeypatch):
    calls = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: calls.append("init"))
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: calls.append("shutdown"))
    with nvml_session() as nvml, nvml_session():
        assert nvml is pynvml
    assert calls == ["init", "init", "shutdown", "shutdown"]


def test_busy_share_is_the_mean_of_compute_and_recompute():
    assert busy_share([Breakdown(0.5, 0.25, 0.25, 0, 0), Breakdown(0.25, 0, 0, 0.5, 0.25)]) == 0.5
