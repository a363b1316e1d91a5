"""The engine on several devices, in a process of its own: see bed/ for the devices and inside/ for the tests.

To run only some of them, with pytest's own output: ``pytest tests/emulator/inside -k mutant``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_bench.emulator import build

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "pytest", "tests/emulator/inside", "--tb=short", "--no-header", "-q"]
OBSTACLE = build.obstacle()
# Asked for more cases than usual, the tests take up to an hour.
LIMIT_S = 900 if "VIRTUAL_DEVICES_STRIDE" not in os.environ else 7200


# The compiler takes 15 s, the tests four minutes.
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
def test_several_devices():
    build.built()
    run = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    passed = re.search(r"(\d+) passed", run.stdout)
    if run.returncode != 0:
        end = "\n".join((run.stdout + run.stderr).splitlines()[-200:])
        pytest.fail(f"{' '.join(COMMAND[2:])} ended with {run.returncode}\n{end}", pytrace=False)
    assert passed, run.stdout
    assert int(passed[1]) > 1000
