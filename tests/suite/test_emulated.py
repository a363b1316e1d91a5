"""Emulated cells: settings, names, jobs, and the rows of a machine that has no compiler."""

from __future__ import annotations

import re

import pytest

from gpipe_bench.cli import main
from gpipe_bench.emulator import build
from gpipe_bench.suite.cells import CELL_PATTERN
from gpipe_bench.suite.emulated_cells import EmulatedCell
from gpipe_bench.suite.running.emulated import emulate_cells
from tests.suite.cells_of import in_file

TINY = {
    "model_args": "depth=1;B=1;C=2;size=4",
    "batch_size": 4,
    "chunks": 2,
    "partitions": 2,
    "balance": "8-9",
}


def cell(**settings):
    return EmulatedCell.model_validate({**TINY, **settings})


def test_the_id_says_what_is_emulated_and_changes_with_every_setting():
    assert re.fullmatch(CELL_PATTERN, cell().id)
    assert cell().id.startswith("emulated-unet-dep-str-ptl-n2-m2-b4-p40-")
    others = [{"host_time": False}, {"steps": 3}, {"profile": "v100"}, {"variant": "baseline"}]
    assert len({cell(**changes).id for changes in ({}, *others)}) == 1 + len(others)


def test_the_simulated_twin_is_the_same_pipeline_with_the_autograd_of_today():
    twin = cell(variant="dep-x-x", optimizer="adam", transfer="host").twin
    assert (twin.flavour, twin.variant, twin.optimizer, twin.transfer) == ("current", "dep-x-x", "adam", "host")
    assert twin.id.startswith("simulated-")


def test_without_a_compiler_a_cell_is_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr(build, "obstacle", lambda: "no compiler here")
    seen = []
    (result,) = emulate_cells([cell()], seen.append)
    row = result.row
    assert seen == [row]
    assert (row.evidence, row.status, row.reason) == ("emulated", "skipped", "no compiler here")
    assert (row.balance, row.profile, row.device_count, row.cell) == ("8-9", "p40", 2, cell().id)
    assert result.configuration == cell().configuration


def test_without_a_compiler_no_cell_counts_as_emulated(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build, "obstacle", lambda: "no compiler here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit):
        main(["emulate", *in_file(tmp_path, cell(), cell(chunks=4)), "--out", str(tmp_path / "raw.json")])
    assert "0 cells emulated, 2 skipped" in capsys.readouterr().out
