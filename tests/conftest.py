"""What holds for every test: those of accelerators are skipped where there are none, and no test depends on a clock."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest

# Tests of this process and of those that it starts: threads inside small operators take more time than they spare, and
# two processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background has them ignore interrupts, as would the processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

with suppress(ImportError):  # tests of GPUs run where Hypothesis is not installed
    from hypothesis import settings

    # The same examples each time, and none is too slow.
    settings.load_profile("ci")

NEEDED = {"gpu": 1, "multigpu": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests for which this machine has too few accelerators."""
    marked = [(item, name) for item in items for name in NEEDED if item.get_closest_marker(name)]
    if not marked:
        return
    # Only now: tests of the pure modules and the workflow do without PyTorch.
    import torch

    available = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    for item, name in marked:
        if available < NEEDED[name]:
            item.add_marker(pytest.mark.skip(reason=f"needs {NEEDED[name]} accelerator(s), got {available}"))
