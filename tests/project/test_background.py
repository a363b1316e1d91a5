"""Tests that a script starts with ``&``: the shell lets such a job ignore interrupts."""

from __future__ import annotations

import signal
import subprocess
import sys

PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
import tests.conftest
signal.raise_signal(signal.SIGINT)
"""


def test_interrupts_reach_tests_that_run_in_the_background():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert done.stderr.endswith("KeyboardInterrupt\n")
