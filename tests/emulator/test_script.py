"""`gpipe-bench emulate`: a script runs to its end on virtual devices, and a planted race is found with its lines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_bench.emulator.build import obstacle

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "emulated" / "planted_race.py"
pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

LOOP = """
import torch
kind = torch.accelerator.current_accelerator().type
places = [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
weights = [torch.ones(64, 64, device=place, requires_grad=True) for place in places]
for _ in range({steps}):
    x = torch.ones(8, 64, device=places[0])
    for place, weight in zip(places, weights):
        x = x.to(place) @ weight
    x.sum().backward()
{end}
"""


def emulate(*words, folder=ROOT):
    command = [sys.executable, "-m", "gpipe_bench", "emulate", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=110
    )


def script(folder, *, steps=3, end=""):
    path = folder / "train.py"
    path.write_text(LOOP.format(steps=steps, end=end))
    return path


def line_of(text):
    lines = EXAMPLE.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_planted_race_is_found_with_operators_and_lines():
    run = emulate(EXAMPLE, "--devices", 2, "--races")
    assert run.returncode == 0, run.stderr
    assert "1 race\n" in run.stdout
    assert re.search(rf"read: device_to_device .*planted_race.py:{line_of('moved =')}\n", run.stdout)
    assert re.search(rf"does not wait for relu.* .*planted_race.py:{line_of('hidden = front')}\n", run.stdout)


def test_with_the_wait_there_is_no_race():
    run = emulate(EXAMPLE, "--devices", 2, "--races", "--", "--mended")
    assert run.returncode == 0, run.stderr
    assert "no races" in run.stdout


def test_steps_end_with_the_backward_pass_where_there_is_no_optimizer(tmp_path):
    run = emulate(script(tmp_path), "--devices", 3, "--profile", "p40", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "emulated on 3 x Tesla P40 (p40)" in run.stdout
    assert re.search(r"2 steps after the first: \d+\.\d+ ms per step", run.stdout)


def test_one_step_is_not_timed(tmp_path):
    run = emulate(script(tmp_path, steps=1), folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "no second step" in run.stdout


def test_the_same_script_takes_the_same_virtual_time(tmp_path):
    path = script(tmp_path)
    assert emulate(path, folder=tmp_path).stdout == emulate(path, folder=tmp_path).stdout


def test_a_timeline_for_perfetto(tmp_path):
    run = emulate(script(tmp_path), "--devices", 2, "--trace", tmp_path / "out.json", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    trace = json.loads((tmp_path / "out.json").read_text())
    slices = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert {row["pid"] for row in slices} == {0, 1}
    assert {"mm", "device_to_device"} <= {row["name"] for row in slices}
    assert trace["otherData"]["evidence"] == "emulated"


def test_an_error_of_the_script_is_shown_as_python_shows_it(tmp_path):
    run = emulate(script(tmp_path, end="raise RuntimeError('mine')"), folder=tmp_path)
    assert run.returncode == 1
    assert "RuntimeError: mine" in run.stderr
    assert "train.py" in run.stderr


def test_tensors_that_do_not_fit_end_the_script(tmp_path):
    run = emulate(script(tmp_path, end="torch.empty(2**36, device=places[0])"), "--profile", "p40", folder=tmp_path)
    assert run.returncode == 1
    assert "OutOfMemoryError: virtual device 0 out of memory: tried to allocate 274877906944 bytes" in run.stderr


def test_there_must_be_a_script(tmp_path):
    run = emulate("absent.py", folder=tmp_path)
    assert run.returncode == 2
    assert run.stderr == "error: script must be a Python file, got 'absent.py'; check the path\n"
