"""What holds for every test.

Those of accelerators are skipped where there are none. Where ``parametrize`` stands three times or more above a test,
its cases are so many that every pair of values occurs; EVERY_CASE=1 runs the whole product, and the slow tests.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.cover import EVERY_CASE, cover

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what others show, and skip the tests for which this machine has too few accelerators."""
    if not EVERY_CASE:
        tests: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            tests[item.nodeid.partition("[")[0]].append(item)
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: EVERY_CASE=1 runs it"))
        products = [cases for cases in tests.values() if len([*_values(cases[0])]) > 2]
        left_out = {case for cases in products for case in {*cases} - {*cover(cases, _values)}}
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    marked = [(item, name) for item in items for name in NEEDED if item.get_closest_marker(name)]
    if not marked:
        return
    # Only now: tests of the pure modules and the workflow do without PyTorch.
    import torch

    available = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    for item, name in marked:
        if available < NEEDED[name]:
            item.add_marker(pytest.mark.skip(reason=f"needs {NEEDED[name]} accelerator(s), got {available}"))


def _values(item: pytest.Item) -> Iterator[tuple[int, ...]]:
    """What a case has of each ``parametrize``, and of each fixture with several values."""
    left = {**item.callspec.params} if hasattr(item, "callspec") else {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        # Cases share these objects, some of which are equal and others not hashable.
        yield tuple(id(left.pop(name.strip())) for name in names)
    yield from ((id(value),) for value in left.values())
