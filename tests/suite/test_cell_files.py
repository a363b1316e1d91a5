"""A cell goes through a file as it is, and keeps the key that results have had."""

from __future__ import annotations

import csv
import json

import pytest

from gpipe_bench.cli import main
from gpipe_bench.cli.cells import from_file
from gpipe_bench.errors import ConfigError
from gpipe_bench.suite.cell_files import cells_text, read_cells
from gpipe_bench.suite.cells import MeasuredCell
from gpipe_bench.suite.emulated_cells import EmulatedCell
from gpipe_bench.suite.simulated_cells import SimulatedCell
from tests.project.tree import ROOT
from tests.suite.cells_of import TINY, cell, in_file

VIRTUAL = {name: value for name, value in TINY.items() if name not in ("warmup", "steps")}
CELLS = [cell(seed=3, schedule="zb_v"), SimulatedCell(**VIRTUAL, flavour="current"), EmulatedCell(**VIRTUAL, steps=3)]
REFERENCE = ROOT / "results" / "reference"


@pytest.mark.parametrize("one", CELLS, ids=lambda one: one.evidence)
def test_a_file_has_cells_of_all_kinds(one, tmp_path):
    (tmp_path / "cells.json").write_text(cells_text(CELLS))
    assert read_cells(tmp_path / "cells.json", type(one)) == [one]
    assert read_cells(tmp_path / "cells.json", type(one), [one.id]) == [one]


@pytest.mark.parametrize(
    ("text", "only", "problems"),
    [
        ("{", [], ["file of cells must be readable JSON, got "]),
        ("[1]", [], ["file of cells must have the settings of each cell by its name, got something else in "]),
        ("{}", [], ["file of cells must have measured ones, got none in "]),
        ('{"mine": {"chunks": 0, "chuncks": 2}}', ["mine", "yours"], [
            *("c.json: mine.chunks must be a whole number of at least 1", "c.json: mine.chuncks must be a known key"),
            "--only must name a cell",
        ]),
        ('{"mine": {"evidence": "simulated"}}', ["mine"], ["c.json: mine.evidence must be one of measured"]),
    ],
)  # fmt: skip
def test_all_problems_of_a_file_are_named(text, only, problems, tmp_path):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_cells(tmp_path / "c.json", MeasuredCell, only)
    assert len(caught.value.problems) == len(problems)
    assert all(problem in found for problem, found in zip(problems, caught.value.problems, strict=True))


def test_cells_of_a_file_are_simulated_as_one_of_options_is(tmp_path, capsys):
    two = [CELLS[1], CELLS[1].changed(chunks=4)]
    given = [*in_file(tmp_path, *two), "--only", two[1].id, "--timelines", two[1].id]
    for out, words in {"file": given, "options": [*_words(), "--chunks", "4"]}.items():
        with pytest.raises(SystemExit):
            main(["simulate", *words, "--out", str(tmp_path / f"{out}.json")])
    (one,), (other,) = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("file", "options"))
    assert one == other
    assert one["events"]


def _words():
    return [word for name, value in VIRTUAL.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_a_file_of_cells_and_options_of_one_exclude_each_other(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["simulate", *in_file(tmp_path, *CELLS), "--chunks", "4", "--out", str(tmp_path / "a.json")])
    assert caught.value.code == 2
    assert "options of a cell must be left out with --cells, got --chunks" in capsys.readouterr().err


MEASURED = REFERENCE / "measured"


def test_cells_that_were_measured_are_simulated_and_emulated_on_a_profile():
    table = MEASURED / "1x-nvidia-h100-80gb-hbm3" / "ablation.csv"
    assert read_cells(table, SimulatedCell, profile="h100") == read_cells(
        table.with_name("ablation_configurations.csv"), SimulatedCell, profile="h100"
    )
    for kind in (SimulatedCell, EmulatedCell):
        cells = read_cells(table, kind, profile="h100")
        assert [cell.variant for cell in cells] == ["baseline", "dep-x-x", "dep-str-x", "dep-str-ptl"]
        same = {(one.devices, one.tf32, one.transfer, one.batch_size, one.profile, one.backward) for one in cells}
        assert same == {(1, False, "host", 128, "h100", "autograd")}
    assert {cell.flavour for cell in read_cells(table, SimulatedCell, profile="h100")} == {"current"}


def test_a_command_takes_no_cell_twice():
    table = MEASURED / "1x-nvidia-h200" / "pipelines.csv"
    commanded = from_file(SimulatedCell, table, "", {"profile": "h200", "launch_us": 39.5})
    assert len(read_cells(table, SimulatedCell, profile="h200")) == 24
    assert len(commanded) == len({cell.id for cell in commanded}) == 18
    assert {cell.launch_us for cell in commanded} == {39.5}


def test_measured_cells_in_halves_are_simulated_and_not_emulated():
    table = MEASURED / "1x-nvidia-h200" / "single_configurations.csv"
    simulated = read_cells(table, SimulatedCell, profile="h200")
    assert {(cell.precision, cell.masters) for cell in simulated} == {("float32", False), ("bfloat16", False)}
    with pytest.raises(ConfigError, match="precision must be a known key"):
        read_cells(table, EmulatedCell, profile="h200")


def test_measured_cells_need_a_profile():
    with pytest.raises(ConfigError, match=r"must have simulated ones, got none in .*; add some, or name a profile"):
        read_cells(MEASURED / "1x-nvidia-h200" / "single_configurations.csv", SimulatedCell)


def reference_rows():
    """Rows of each reference table that has some of cells, with their configurations."""
    for table in sorted(REFERENCE.glob("*/*/*_configurations.csv")):
        with table.open(newline="") as file:
            texts = {line["config_sha256"]: line["configuration"] for line in csv.DictReader(file)}
        with table.with_name(table.name.replace("_configurations", "")).open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("cell", "").startswith(tuple(KINDS))]
        for row in rows[::97]:
            settings = json.loads(texts[row["config_sha256"]])
            # Races, and steps of one GPU, are no cells.
            settings.pop("model_files", None)
            if not {"contender", "engine"} & settings.keys():
                yield row, settings


KINDS = {"measured-": MeasuredCell, "simulated-": SimulatedCell, "emulated-": EmulatedCell}


def test_reference_rows_keep_their_keys_and_columns():
    seen = set()
    for row, settings in reference_rows():
        evidence = row["evidence"]
        seen.add(evidence)
        made = KINDS[f"{evidence}-"].model_validate(settings)
        assert made.id == row["cell"]
        columns = made.columns()
        names = ("backward", "schedule", "chunks", "checkpoint", "model_args", "config_sha256")
        assert [str(columns[name]) for name in names] == [row[name] for name in names]
    assert seen == {"measured", "simulated", "emulated"}
