"""What every test of the engine starts from: one thread per operator, a fixed seed, double precision untouched."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch

from gpipe_bench import GPipe
from gpipe_bench.engine import pipeline
from gpipe_bench.engine.microbatch_lanes import MicroBatchLanes


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def used(monkeypatch):
    """How many batches had a graph for each micro-batch, as in :mod:`gpipe_bench.engine.microbatch_lanes`."""
    count = Counter()

    class Counted(MicroBatchLanes):
        def __init__(self, *args) -> None:
            count["batches"] += 1
            super().__init__(*args)

    monkeypatch.setattr(pipeline, "MicroBatchLanes", Counted)
    return lambda: count["batches"]


@pytest.fixture
def no_gc():
    """Reference cycles stay, so that only what is freed by itself is freed; what exists already is out of sight."""
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.fixture(scope="module", params=["autograd", "scheduled"])
def either_backward(request):
    """Runs the tests of a module twice: the backward mode is what a pipeline takes by default."""
    defaults = GPipe.__init__.__kwdefaults__
    before, defaults["backward"] = defaults["backward"], request.param
    yield request.param
    defaults["backward"] = before
