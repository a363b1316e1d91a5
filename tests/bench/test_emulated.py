"""Emulated cells: settings, names, jobs, and the rows of a machine that has no compiler."""

from __future__ import annotations

import re

import pytest

from gpipe_bench.bench.experiments.config import SuiteConfig, parse_config
from gpipe_bench.bench.running.emulated import emulate_cells
from gpipe_bench.bench.running.simulation_groups import group_cells
from gpipe_bench.bench.spec.cells import CELL_PATTERN
from gpipe_bench.bench.spec.emulated_cells import EmulatedCell
from gpipe_bench.cli import main
from gpipe_bench.components import Components
from gpipe_bench.emulator import build
from gpipe_bench.errors import ConfigError
from tests.bench.cells_of import in_file

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


def test_a_process_has_sixteen_devices():
    with pytest.raises(ConfigError, match="must be at most 16 where they are emulated, got 17 devices"):
        parse_config({"ablation": {"emulated": {"model": "gpt2-xl", "partitions": 17, "balance": "auto"}}})


def test_a_job_has_a_file_of_its_own():
    (group,) = group_cells([([cell(), cell(checkpoint="never", variant="baseline")], True)])
    assert group.path == f"results/emulated/{group.id}.json"


def test_the_ablation_is_emulated_in_every_variant_and_simulated_beside():
    ablation = SuiteConfig().ablation
    cells = ablation.emulations()
    assert {one.variant for one in cells} == {components.label for components in Components.factorial()}
    assert {one.twin.id for one in cells} <= {one.id for one in ablation.simulations()}
    assert {(one.model_args, one.balance, one.profile) for one in cells} == {
        ("depth=5;B=5;C=64;size=192", (34, 76, 70, 61), "p40")
    }


def test_published_tables_are_emulated_as_they_were_run():
    suite = SuiteConfig()
    assert sorted(one.partitions for one in suite.speed.emulations() if one.model == "unet") == [1, 1, 2, 4, 8]
    assert {one.partitions for one in suite.speed.emulations() if one.model == "amoebanet-d"} == {2, 4, 8}
    assert {one.partitions for one in suite.memory.emulations() if one.model == "unet"} == {1, 2, 4, 8}


def test_cells_of_a_sweep_are_emulated_by_name():
    suite = SuiteConfig()
    for name, sweep in suite.sweep.simulated.items():
        cells = sweep.emulations()
        assert len(cells) == len(sweep.emulated) == 3, name
        assert max(one.partitions for one in cells) == 16
        assert {one.twin.id for one in cells} <= {one.id for one in sweep.simulations()}


def test_cells_of_a_sweep_that_cannot_be_emulated_are_named():
    with pytest.raises(ConfigError) as caught:
        parse_config({"sweep": {"simulated": {"mine": {"emulated": ["n4-m8", "n32-m32-b256-always"]}}}})
    assert [problem.partition("emulated ")[2] for problem in caught.value.problems] == [
        "must have cells like n4-m16-b256-always, got 'n4-m8'; write partitions, chunks, batch, mode",
        "must have cells of at most 16 partitions, got 'n32-m32-b256-always'; leave it out",
    ]


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
