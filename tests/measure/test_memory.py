"""Peaks of an allocator that keeps statistics; the CPU's keeps none."""

import pytest
import torch

from gpipe_bench.errors import UnsupportedError
from gpipe_bench.measure import memory
from gpipe_bench.measure.memory import PeakMemory, has_memory_statistics, peak_memory, reset_peak_memory


def test_the_cpu_keeps_no_statistics():
    assert not has_memory_statistics("cpu")


@pytest.mark.parametrize("ask", [peak_memory, reset_peak_memory])
def test_a_device_without_statistics_is_refused_by_name(ask):
    with pytest.raises(UnsupportedError, match="got cpu, meta; count with LiveBytes"):
        ask(["cpu", "meta", "cpu"])


def test_peaks_are_read_once_per_device_in_order_of_use(monkeypatch):
    monkeypatch.setattr(memory, "has_memory_statistics", lambda device: True)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 10 + device.index)
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda device: 20 + device.index)
    assert peak_memory(["cuda:1", "cuda:0", "cuda:1"]) == [PeakMemory("cuda:1", 11, 21), PeakMemory("cuda:0", 10, 20)]
