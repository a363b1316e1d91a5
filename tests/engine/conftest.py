"""What every test of the engine starts from: one thread per operator, a fixed seed, double precision untouched."""

from __future__ import annotations

import gc

import pytest
import torch

from gpipe_bench import GPipe


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


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
