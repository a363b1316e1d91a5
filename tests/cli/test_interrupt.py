"""Ctrl-C: the word ``interrupted``, exit status 130 and no traceback, whatever the command was doing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from gpipe_bench.suite.simulated_cells import SimulatedCell
from tests.suite.cells_of import cell, in_file


def start(*arguments, python=()):
    command = [sys.executable, *python, "-m", "gpipe_bench", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def interrupted(process, stream, marker):
    """Wait for a marker in a stream of the process, interrupt it, and return what else it prints on stderr."""
    assert any(marker in line for line in stream), f"{marker} never came"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    return err


@pytest.mark.parametrize("module", ["importlib.metadata", "pydantic_core", "gpipe_bench.models.table"])
def test_while_the_commands_load(module):
    """Python itself says which module it has loaded."""
    process = start("simulate", python=("-X", "importtime"))
    err = interrupted(process, process.stderr, f" {module}\n")
    assert process.returncode == 130
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err


@pytest.mark.parametrize("module", ["torch._C", "torch.nn.modules.module"])
def test_while_pytorch_loads(module):
    process = start("simulate", "--model", "vit", python=("-X", "importtime"))
    err = interrupted(process, process.stderr, f" {module}\n")
    assert process.returncode == 130
    assert "interrupted\n" in err
    assert "Traceback" not in err


def test_between_repeats(tmp_path):
    process = start("run", *in_file(tmp_path, cell()), "--repeats", 10_000, "--out", tmp_path / "a.json")
    err = interrupted(process, process.stdout, "ok: ")
    assert (process.returncode, err) == (130, "interrupted\n")
    assert not (tmp_path / "a.json").exists()


def test_between_simulations(tmp_path):
    cells = [SimulatedCell(partitions=2, balance="auto", chunks=m, batch_size=512) for m in range(1, 200)]
    process = start("simulate", *in_file(tmp_path, *cells), "--processes", 2, "--out", tmp_path / "a.json")
    err = interrupted(process, process.stdout, "simulated, ok")
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
