"""Locks of a killed run go; those of one that still runs stay."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpipe_bench.suite.running.locks import drop_stale_locks
from tests.project.tree import ROOT

HOLD = """
import sys
from pathlib import Path
from gpipe_bench.suite.running.locks import drop_stale_locks
drop_stale_locks(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["running", "killed"])
def test_locks_go_when_no_run_holds_them(tmp_path, end):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "held\n"
        lock = tmp_path / "locks" / "0.output.lock"
        lock.parent.mkdir()
        lock.write_text("results/ablation.csv\n")
        if end == "killed":
            other.kill()
            other.wait()
        assert drop_stale_locks(tmp_path) == (end == "killed")
        assert lock.exists() == (end == "running")
    finally:
        other.kill()
        other.communicate()


def test_the_file_that_a_run_holds_is_closed_at_its_end(tmp_path):
    words = [sys.executable, "-W", "error::ResourceWarning", "-c", HOLD, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("held\n", "")
