"""A whole profile of the CPU, as short as it can be."""

import json

import pytest
import torch

from gpipe_bench.measure import device_profile
from gpipe_bench.measure.device_profile import measure_device_profile
from gpipe_bench.measure.kernels import KERNEL_CLASSES, KernelCase


@pytest.fixture(scope="module")
def profile():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield measure_device_profile("cpu", seconds=0.01)
    torch.set_num_threads(before)


def rows(profile):
    return [*profile["kernels"], *profile["links"], *profile["launch"]]


def test_it_is_plain_json(profile):
    assert json.loads(json.dumps(profile)) == profile


def test_every_case_has_its_samples_and_their_spread(profile):
    for row in rows(profile):
        assert row["status"] == "ok"
        assert 3 <= len(row["samples_us"]) <= 20
        assert min(row["samples_us"]) > 0
        assert row["time_us"]["min"] == min(row["samples_us"])
        assert row["time_us"]["max"] == max(row["samples_us"])


def test_rates_follow_from_counts_and_times(profile):
    for row in profile["kernels"]:
        assert row["achieved_gb_per_s"]["max"] == pytest.approx(row["bytes"] / row["time_us"]["min"] / 1e3)
        assert ("achieved_gflop_per_s" in row) == (row["class"] != "memory_bound")
        if row["flop"]:
            assert row["achieved_gflop_per_s"]["min"] == pytest.approx(row["flop"] / row["time_us"]["max"] / 1e3)


def test_a_class_spans_its_cases(profile):
    assert list(profile["classes"]) == list(KERNEL_CLASSES)
    for name, found in profile["classes"].items():
        key = "achieved_gb_per_s" if name == "memory_bound" else "achieved_gflop_per_s"
        members = [row for row in profile["kernels"] if row["class"] == name]
        assert found["cases"] == len(members)
        assert found[key]["min"] == min(row[key]["min"] for row in members)
        assert found[key]["max"] == max(row[key]["max"] for row in members)


def test_it_says_where_it_was_taken_and_which_settings_decide_on_kernels(profile):
    assert profile["environment"]["device"].startswith("cpu ")
    assert profile["settings"]["threads"] == 1
    assert profile["settings"]["dtype"] == "float32"


def test_launches_are_timed_for_the_host_and_for_the_device(profile):
    assert [row["name"] for row in profile["launch"]] == ["host_per_launch", "device_per_launch"]


def test_a_case_that_does_not_fit_is_a_row_with_the_reason(monkeypatch):
    def prepare():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB.\nmore")

    case = KernelCase("memory_bound", "add: huge", "forward", 0, 4, prepare)
    monkeypatch.setattr(device_profile, "kernel_cases", lambda device: [case])
    monkeypatch.setattr(device_profile, "link_cases", lambda device: [])
    found = measure_device_profile("cpu", seconds=0.01)
    (row,) = found["kernels"]
    assert row["status"] == "oom"
    assert row["reason"] == "CUDA out of memory. Tried to allocate 80 GiB."
    assert found["classes"]["memory_bound"] == {"cases": 0}


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_there_must_be_time(seconds):
    with pytest.raises(ValueError, match=f"seconds must be positive, got {seconds}"):
        measure_device_profile("cpu", seconds)
