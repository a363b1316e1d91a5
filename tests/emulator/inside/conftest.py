"""The device type is registered before any test runs."""

from __future__ import annotations

import gc

import pytest
import torch
import torch._dynamo  # what optimizers import

from gpipe_bench.emulator.library import devices, leave, load

load(8)
DEFAULT_STREAMS = [torch.accelerator.current_stream(device) for device in devices()]


@pytest.fixture(autouse=True)
def _fresh():
    """Equal seeds, default streams and the first device."""
    torch.manual_seed(0)
    for stream in reversed(DEFAULT_STREAMS):
        torch.accelerator.set_stream(stream)


def pytest_collection_finish():
    # Nothing of PyTorch is garbage: collections, some of which tests ask for, need not look at it.
    gc.freeze()


def pytest_sessionfinish(session, exitstatus):
    session.config.exit_status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    leave(config.exit_status)
