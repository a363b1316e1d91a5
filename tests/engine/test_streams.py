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
    transfer.shared_stream.cache_clear()
    device = torch.device("cuda", 0)
    transfer.shared_stream(device, 0, copying=copying)
    assert asked == [(device, priority)]


def test_the_cpu_has_none():
    cpu = torch.device("cpu")
    assert transfer.shared_stream(cpu, 0) is transfer.shared_stream(cpu, 0, copying=True) is None
    assert transfer.current_stream(cpu) is None
