"""Streams on a machine without any: what is asked of PyTorch."""

from __future__ import annotations

import pytest
import torch

from gpipe_bench.engine import transfer


@pytest.mark.parametrize(("copying", "priority"), [(True, -1), (False, 0)])
def test_streams_that_copy_come_from_a_pool_of_their_own(monkeypatch, copying, priority):
    asked = []
    monkeypatch.setattr(transfer, "has_streams", lambda device: True)
    monkeypatch.setattr(torch, "Stream", lambda device, *, priority: asked.append((device, priority)))
    device = torch.device("cuda", 0)
    transfer.new_stream(device, copying=copying)
    assert asked == [(device, priority)]


def test_the_cpu_has_none():
    cpu = torch.device("cpu")
    assert transfer.new_stream(cpu) is transfer.new_stream(cpu, copying=True) is transfer.current_stream(cpu) is None
