"""The clock: what is timed, what is synchronised, in which order."""

import pytest
import torch

from gpipe_bench.measure import clock
from gpipe_bench.measure.devices import distinct_accelerators, distinct_devices


@pytest.fixture
def log(monkeypatch):
    """Everything that happens, in order; the clock counts its own readings."""
    entries = []

    def read():
        entries.append("clock")
        return float(entries.count("clock") ** 2)

    monkeypatch.setattr(clock, "perf_counter", read)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: entries.append(f"synchronize {device}"))
    return entries


def test_every_device_is_synchronised_before_each_clock_read(log):
    clock.timed(lambda: log.append("step"), ["cuda:1", "cpu", "cuda:0", "cuda:1"], steps=2, warmup=1)
    both = ["synchronize cuda:1", "synchronize cuda:0"]
    timed_step = [*both, "clock", "step", *both, "clock"]
    assert log == ["step", *timed_step, *timed_step]


def test_seconds_are_the_difference_of_the_clock_around_each_step(log):
    # readings 1, 4 around the first step, 9, 16 around the second
    assert clock.timed(lambda: None, ["cpu"], steps=2, warmup=3) == [3.0, 7.0]


def test_the_cpu_needs_no_synchronisation(log):
    clock.synchronize(["cpu", torch.device("cpu")])
    assert log == []


@pytest.mark.parametrize(("steps", "warmup", "name"), [(0, 0, "steps"), (-1, 0, "steps"), (1, -1, "warmup")])
def test_counts_are_checked(steps, warmup, name):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least"):
        clock.timed(lambda: None, ["cpu"], steps, warmup)


def test_what_a_step_raises_comes_out():
    with pytest.raises(ZeroDivisionError):
        clock.timed(lambda: 1 / 0, ["cpu"], steps=1, warmup=0)


def test_devices_are_distinct_in_order_of_use():
    found = distinct_devices(["cpu", "cuda:1", torch.device("cpu"), "cpu:0", torch.device("cuda", 1), "cuda:0"])
    assert found == [torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda", 0)]


def test_a_device_without_index_is_the_current_one():
    assert distinct_devices(["cuda", "cuda:0"]) == [torch.device("cuda", 0)]


def test_accelerators_are_what_runs_behind_the_host():
    assert distinct_accelerators(["cpu", "cuda:3", "meta"]) == [torch.device("cuda", 3)]
