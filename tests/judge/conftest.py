"""Behaviours of memory collect garbage often: what PyTorch has loaded is left out."""

from __future__ import annotations

import gc

import pytest

# Checkpoints load it; here it is loaded before it is left out.
import torch._dynamo  # noqa: F401 - what it loads is what counts


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    gc.freeze()
    yield
    gc.unfreeze()
