"""What makes tracing short leaves the traces as they are."""

from __future__ import annotations

import gc

import torch
from torch import nn

from gpipe_bench.kernels.kernel import Kernel
from gpipe_bench.simulator.tracing.model_trace import Tracer
from gpipe_bench.simulator.tracing.recorder import Recorder
from gpipe_bench.util.garbage import retire_collection


def test_an_operand_that_is_given_twice_is_read_once():
    x, y = (torch.empty(4, 3, device="meta") for _ in range(2))
    with Recorder() as recorder:
        for other in (y, x, y):
            torch.mul(x, other)
    read = [step.whole.bytes_read for step in recorder.take() if isinstance(step, Kernel)]
    assert read == [2 * x.nbytes, x.nbytes, 2 * x.nbytes]


def test_a_model_of_ones_own_needs_no_copies():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
        sample = torch.empty(2, 3, 4, 4)
    tracers = [Tracer(model, sample, owned=owned) for owned in (False, True)]
    facts = [tracer.facts() for tracer in tracers]
    found = [tracer.trace(6) for tracer in tracers]
    assert found[0] == found[1]
    assert facts[0] == facts[1] == tracers[1].facts()


def test_a_process_that_ends_searches_nothing():
    before = gc.get_freeze_count()
    try:
        retire_collection()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
