"""Networks of libraries by name: in a cell, measured from the command line, and simulated."""

from __future__ import annotations

import json
import re

import pytest

from gpipe_bench.cli import main
from gpipe_bench.suite.cells import CELL_PATTERN, MeasuredCell

NAME = "timm/test_resnet"
ARGUMENTS = "size=32;classes=5"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, arguments)))
    found = capsys.readouterr()
    assert not caught.value.code, found.err
    return found.out


def test_a_cell_has_a_name_that_a_folder_can_have():
    cell = MeasuredCell(model=NAME, model_args=ARGUMENTS, partitions=2, balance=(3, 3))
    assert re.fullmatch(CELL_PATTERN, cell.id)
    assert cell.settings()["model"] == NAME


def test_it_is_measured_with_a_balance_that_nobody_gave(capsys, tmp_path):
    out = tmp_path / "raw.json"
    given = ("--model-args", ARGUMENTS, "--partitions", 2, "--chunks", 2, "--batch-size", 4, "--steps", 1)
    call(capsys, "run", "--out", out, "--model", NAME, *given, "--variant", "dep-x-ptl")
    row = json.loads(out.read_text())["row"]
    assert row["status"] == "ok"
    assert row["model"] == NAME
    assert len(row["balance"].split("-")) == 2


def test_it_is_simulated(capsys):
    out = call(capsys, "simulate", "--model", NAME, "--model-args", ARGUMENTS, "--batch-size", 8, "--chunks", 2)
    assert NAME in out
    assert "samples/s simulated" in out
