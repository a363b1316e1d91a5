"""Facts of machine and software: columns of a row, and never an exception."""

from datetime import datetime
from importlib.metadata import version

import pytest
import torch

from gpipe_bench.measure import environment
from gpipe_bench.measure.environment import environment_facts
from gpipe_bench.measure.host import host_facts, machine_slug
from gpipe_bench.results.rows import Row


def test_facts_are_columns_of_a_row():
    facts = environment_facts(["cpu", "cpu"])
    row = Row(**facts)
    assert row.device.startswith("cpu ")
    assert row.device_count == 1
    assert row.torch == version("torch")
    assert row.python.count(".") == 2
    assert datetime.fromisoformat(row.started_utc).utcoffset().total_seconds() == 0


def test_facts_are_complete():
    expected = {"device", "device_count", "profile", "torch", "cuda", "driver", "python"}
    expected |= {"commit", "dirty", "started_utc"}
    assert set(environment_facts(["cpu"])) == expected


def test_distinct_devices_are_counted():
    assert environment_facts(["cuda:0", "cuda:0", "cuda:1"])["device_count"] == 2


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Tesla P40", "4x-tesla-p40"),
        ("NVIDIA H100 80GB HBM3", "4x-nvidia-h100-80gb-hbm3"),
        ("Intel(R) Xeon(R) CPU E5-2650 v4 @ 2.20GHz", "4x-intel-xeon-e5-2650-v4"),
        ("AMD EPYC 7B13", "4x-amd-epyc-7b13"),
        ("", "4x-device"),
    ],
)
def test_the_machine_s_name_is_fit_for_a_folder(name, slug):
    assert machine_slug(name, 4) == slug


def test_without_pytorch_the_facts_of_the_host_are_the_same():
    facts, expected = host_facts(), environment_facts(["cpu"])
    assert {**facts, "started_utc": ""} == {name: expected[name] for name in facts} | {"started_utc": ""}


def test_a_device_that_this_build_cannot_reach_is_named_by_its_type(monkeypatch):
    def refuse(device):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "get_device_name", refuse)
    assert environment.device_name(torch.device("cuda", 0)) == "cuda"
