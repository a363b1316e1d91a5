"""The device type is registered, with devices that compute nothing, before any test runs."""

from __future__ import annotations

import pytest

from gpipe_bench.emulator.library import leave
from gpipe_bench.emulator.shapes import load_shapes
from gpipe_bench.machine.profile import load_profile

load_shapes(16, load_profile("p40"))


def pytest_sessionfinish(session, exitstatus):
    session.config.exit_status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    leave(config.exit_status)
