"""Devices are counted without PyTorch, by CUDA's own rules."""

from __future__ import annotations

import pytest

from gpipe_bench.errors import DeviceCountError
from gpipe_bench.suite import machine
from gpipe_bench.suite.machine import Machine, find_machine, visible_gpus

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33"]


@pytest.fixture
def gpus(monkeypatch):
    """A machine with three GPUs and a PyTorch that supports them."""
    monkeypatch.setattr(machine, "_nvml_uuids", lambda: list(UUIDS))
    monkeypatch.setattr(machine, "_torch_has_cuda", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("setting", "count"),
    [
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,0", 2),
        ("0,1,2", 3),
        ("0, 1", 2),
        ("0,7,1", 1),  # CUDA stops at the first entry that names no GPU
        ("7", 0),
        ("1,1", 0),  # and refuses doubles
        ("GPU-bb", 1),
        ("GPU-aa", 0),  # two begin so
        ("GPU-aa11,GPU-bb33", 2),
        ("MIG-0123", 1),
        ("none", 0),
    ],
)
def test_visible_devices(gpus, setting, count):
    gpus.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert visible_gpus() == count


def test_all_gpus_are_visible_where_nothing_is_set(gpus):
    assert visible_gpus() == 3


def test_auto_takes_the_gpus(gpus):
    assert find_machine() == find_machine("cuda") == Machine("cuda", 3)


def test_the_cpu_can_be_chosen_beside_gpus(gpus):
    assert find_machine("cpu") == Machine("cpu", 1)


def test_auto_falls_back_to_the_cpu(gpus):
    gpus.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_machine("auto") == Machine("cpu", 1)


def test_gpus_that_pytorch_cannot_use_do_not_count(gpus):
    gpus.setattr(machine, "_torch_has_cuda", lambda: False)
    assert visible_gpus() == 0


def test_no_gpu_where_one_was_asked_for(gpus):
    gpus.setattr(machine, "_nvml_uuids", list)
    with pytest.raises(DeviceCountError, match=r"device cuda must have a GPU .* got none; use device cpu"):
        find_machine("cuda")


def test_an_unknown_device():
    with pytest.raises(ValueError, match="device must be auto or one of cpu, cuda, got 'tpu'"):
        find_machine("tpu")


def test_what_pytorch_was_built_for_is_read_without_importing_it():
    import torch

    assert machine._torch_has_cuda() == (torch.version.cuda is not None)


def test_jobs_of_a_cluster_get_what_the_configuration_says():
    """A login node has no GPU to count."""
    assert find_machine("cuda", 4) == Machine("cuda", 4)
    assert find_machine("cpu", 4) == Machine("cpu", 1)
