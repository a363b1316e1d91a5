"""Accelerators for the tests of this folder. Nothing beyond pytest and PyTorch: a rented machine has no more."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def accelerators() -> list[torch.device]:
    """Every accelerator of this machine; at least one, since tests marked ``gpu`` are skipped elsewhere."""
    if not torch.accelerator.is_available():
        pytest.skip("needs 1 accelerator(s), got 0")
    kind = torch.accelerator.current_accelerator().type
    return [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


@pytest.fixture
def device(accelerators) -> torch.device:
    return accelerators[0]


@pytest.fixture
def pair(accelerators) -> list[torch.device]:
    """Two of them."""
    if len(accelerators) < 2:
        pytest.skip(f"needs 2 accelerator(s), got {len(accelerators)}")
    return accelerators[:2]


@pytest.fixture(params=["one", pytest.param("two", marks=pytest.mark.multigpu)])
def devices(request, accelerators) -> list[torch.device]:
    """One of them, then two."""
    return accelerators[: 1 if request.param == "one" else 2]


@pytest.fixture(autouse=True)
def _fresh(accelerators):
    """Equal seeds; the first device current before and after."""
    torch.manual_seed(0)
    torch.accelerator.set_device_index(0)
    yield
    for device in accelerators:
        torch.accelerator.synchronize(device)
    assert torch.accelerator.current_device_index() == 0
