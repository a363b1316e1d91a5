"""The commands of docs/torchrun.md, and the examples that it names, run as they are printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gpipe_bench.emulator.build import obstacle
from tests.processes import command

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "torchrun.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^gpipe-bench (emulate --nproc .+)$", PAGE, re.MULTILINE)
# The others are in the tests beside, with other arguments.
QUICK = [line for line in COMMANDS if "--width" in line or "transformer" in line]
pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))


def test_the_page_has_commands():
    assert len(COMMANDS) >= 4
    assert QUICK


@pytest.mark.parametrize(
    "line", [line if line in QUICK else pytest.param(line, marks=pytest.mark.slow) for line in COMMANDS]
)
def test_commands_of_the_page_run(line):
    shown = command(shlex.split(line), ROOT)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"2 steps after the first, until all ranks end it: [\d.]+ ms per step", shown.stdout)
    assert "error of simulated samples/s on h100: " in shown.stdout
    if "--memory" in line:
        assert re.search(r"^ *1  recv +\d+ +\d", shown.stdout, re.MULTILINE), shown.stdout


@pytest.mark.slow
def test_a_model_that_pytorch_cuts_runs_too():
    shown = command(
        ["emulate", "--nproc", 2, ROOT / "examples" / "emulated" / "torchrun_transformer.py", "--", "--traced"], ROOT
    )
    assert shown.returncode == 0, shown.stderr
    assert "2 steps after the first" in shown.stdout
