"""What every test of the engine starts from: one thread per operator, a fixed seed, double precision untouched."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch

from tests.engine.support import on_cpu


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


@pytest.fixture(params=[None, "gpipe"], ids=["autograd", "gpipe"])
def either(request):
    """Makes pipelines that can be called: of the paper's executor, and with a schedule."""
    return partial(on_cpu, schedule=request.param)
