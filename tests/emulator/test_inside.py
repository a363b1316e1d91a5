"""Virtual devices in processes of their own: the engine on devices that compute, and devices that compute nothing.

To run only some of the tests, with pytest's own output: ``pytest tests/emulator/inside -k mutant``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_bench.emulator import build
from tests.cover import EVERY_CASE

ROOT = Path(__file__).resolve().parents[2]
OBSTACLE = build.obstacle()
# Asked for more cases than usual, the tests take up to an hour.
LIMIT_S = 7200 if EVERY_CASE or "VIRTUAL_DEVICES_CASES" in os.environ else 1800


# The compiler takes 25 s, the tests two minutes.
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
@pytest.mark.parametrize(("folder", "least"), [("inside", 1100), ("shapes", 30)])
def test_virtual_devices(folder, least):
    build.built()
    command = [sys.executable, "-m", "pytest", f"tests/emulator/{folder}", "--tb=short", "--no-header", "-q"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    passed = re.search(r"(\d+) passed", run.stdout)
    if run.returncode != 0:
        end = "\n".join((run.stdout + run.stderr).splitlines()[-200:])
        pytest.fail(f"{' '.join(command[2:])} ended with {run.returncode}\n{end}", pytrace=False)
    assert passed, run.stdout
    assert int(passed[1]) > least
