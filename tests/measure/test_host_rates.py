"""Threads that launch at once: when they start, and what happens if one of them fails."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpipe_bench.measure import host_rates

CPU = torch.device("cpu")


class OneFails(nn.Module):
    """The third pass of all fails: with four threads, before they start."""

    passes = count()

    def forward(self, data):
        if next(self.passes) == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return data


def launching(monkeypatch, make):
    monkeypatch.setattr(host_rates, "TINY", {"transformer": (make, (1,))})


def test_a_thread_that_fails_lets_the_others_go_and_its_error_is_raised(monkeypatch):
    launching(monkeypatch, OneFails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        host_rates._seconds_each(CPU, 4)


def test_time_begins_where_the_first_thread_starts(monkeypatch):
    ticks = count()
    launching(monkeypatch, nn.Identity)
    monkeypatch.setattr(host_rates, "Barrier", lambda _: SimpleNamespace(wait=int, abort=int))
    monkeypatch.setattr(host_rates, "perf_counter", lambda: next(ticks))
    # Two threads read the clock twice each, whatever their order, and the caller never.
    assert host_rates._seconds_each(CPU, 2) == 3 / 2
