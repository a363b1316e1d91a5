"""Rows of a run become reference results: by evidence and hardware, valid, with their companions."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from gpipe_bench.cli import main
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.configurations import CONFIGURATION_COLUMNS, configuration_records
from gpipe_bench.results.schema import TABLES
from gpipe_bench.results.tables import csv_text
from gpipe_bench.results.transparency_rows import GROUP, VERDICT_COLUMNS, TransparencyRow
from gpipe_bench.suite.datapackage.check import check_folder
from gpipe_bench.suite.datapackage.descriptor import write_descriptor
from gpipe_bench.suite.datapackage.take import place_name, result_tables, take_reference
from gpipe_bench.suite.evaluation.collect import write_tables
from gpipe_bench.suite.running.run import failed_result
from gpipe_bench.util.files import write_files
from tests.suite.cells_of import cell, ok_result


def lines(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_measured_rows_go_to_their_machine(table, tmp_path):
    written = take_reference(table, tmp_path / "reference", "Quiet Box 2")
    folder = tmp_path / "reference" / "measured" / "quiet-box-2"
    assert folder / "ablation.csv" in written
    assert lines(folder / "ablation.csv") == lines(table)
    assert lines(folder / "ablation_steps.csv") == lines(table.with_name("ablation_steps.csv"))


def test_a_cell_that_did_not_run_goes_to_the_machine_of_the_others(tmp_path):
    skipped = failed_result(cell(variant="baseline"), 1, "skipped", "no time was left")
    skipped = replace(skipped, row=replace(skipped.row, profile=""))  # as for a GPU, which only PyTorch knows
    write_tables([ok_result("baseline", 0), skipped], "ablation", table := tmp_path / "ablation.csv")
    take_reference(table, tmp_path / "reference")
    (taken,) = (tmp_path / "reference" / "measured").glob("*/ablation.csv")
    assert [line["status"] for line in lines(taken)] == ["ok", "skipped"]


def test_what_was_taken_is_a_valid_package(table, tmp_path):
    folder = tmp_path / "reference"
    take_reference(table, folder, "box")
    write_descriptor(folder)
    assert check_folder(folder) == []


def test_rows_and_companions_are_parted_by_evidence(tmp_path):
    measured, other = ok_result("baseline", 0), ok_result("dep-x-ptl", 0)
    row = replace(other.row, evidence="simulated", profile="p40", repeat=None)
    table = tmp_path / "ablation.csv"
    write_tables([measured, replace(other, row=row)], "ablation", table, published=[replace(row, evidence="published")])
    take_reference(table, tmp_path / "reference", "box")
    simulated = tmp_path / "reference" / "simulated" / "p40"
    assert [line["variant"] for line in lines(simulated / "ablation.csv")] == ["dep-x-ptl"]
    assert {line["variant"] for line in lines(simulated / "ablation_steps.csv")} == {"dep-x-ptl"}
    box = tmp_path / "reference" / "measured" / "box"
    assert {line["variant"] for line in lines(box / "ablation_steps.csv")} == {"baseline"}
    for folder, result in ((simulated, other), (box, measured)):
        (line,) = lines(folder / "ablation_configurations.csv")
        assert line["configuration"] == result.configuration
    assert not (tmp_path / "reference" / "published").exists()


def test_a_companion_of_rows_that_were_there_before_goes_with_them(table, tmp_path):
    take_reference(table, tmp_path / "reference", "box")
    table.with_name("ablation_events.csv").unlink()
    take_reference(table, tmp_path / "reference", "box")
    left = {path.name for path in (tmp_path / "reference" / "measured" / "box").iterdir()}
    assert left == {"ablation.csv", "ablation_configurations.csv", "ablation_devices.csv", "ablation_steps.csv"}


def test_rows_of_another_commit_are_not_replaced_without_a_word(tmp_path):
    row, said = replace(ok_result("baseline", 0).row, evidence="simulated", profile="p40", repeat=None), []
    for commit in ("a" * 40, "a" * 40, "b" * 40):
        made = replace(ok_result("baseline", 0), row=replace(row, commit=commit))
        write_tables([made], "ablation", table := tmp_path / "ablation.csv")
        take_reference(table, tmp_path / "reference", tell=said.append)
    target = tmp_path / "reference/simulated/p40/ablation.csv"
    assert said == [f"{target}: rows of commit {'b' * 12} replace those of {'a' * 12}"]


def test_hardware_without_a_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="pass --machine NAME"):
        place_name(" / ", tmp_path)


def test_a_companion_is_no_table_of_rows(table, tmp_path):
    with pytest.raises(ConfigError, match="table must be one of rows, got steps"):
        take_reference(table.with_name("ablation_steps.csv"), tmp_path / "reference")


def test_published_rows_alone_are_not_taken(tmp_path):
    made = ok_result("baseline", 0)
    table = tmp_path / "ablation.csv"
    write_tables([], "ablation", table, published=[replace(made.row, evidence="published")])
    with pytest.raises(ConfigError, match="rows must hold simulated, emulated or measured ones"):
        take_reference(table, tmp_path / "reference")


def training(path, profiles):
    """A table of training runs and two of its companions."""
    given = configuration_records(["{}", '{"runs": []}'])
    own, whole = (record["config_sha256"] for record in given)
    origin = {"commit": "c" * 40, "torch": "2.13.0", "python": "3.11.7", "config_sha256": own}
    rows = [TransparencyRow(model="unet", arm="plain", profile=name, **origin) for name in profiles]
    setting = {name: rows[0].to_dict()[name] for name in GROUP}
    claim = {**setting, "quantity": "iou_fraction", "commit": "c" * 40, "config_sha256": whole, "schema_version": 2}
    texts = {path: csv_text(TransparencyRow.columns(), [row.to_dict() for row in rows])}
    texts[path.with_name(f"{path.stem}_verdict.csv")] = csv_text(VERDICT_COLUMNS, [claim])
    texts[path.with_name(f"{path.stem}_configurations.csv")] = csv_text(CONFIGURATION_COLUMNS, given)
    write_files(texts)
    return path


def test_training_runs_are_taken_with_their_verdicts(tmp_path):
    table = training(tmp_path / "transparency.csv", ["box"])
    written = take_reference(table, tmp_path / "reference")
    names = ["transparency.csv", "transparency_configurations.csv", "transparency_verdict.csv"]
    assert sorted(path.name for path in written) == names
    write_descriptor(tmp_path / "reference")
    assert check_folder(tmp_path / "reference") == []


def test_the_single_steps_of_a_race_stay_with_the_run(tmp_path):
    race = REFERENCE_FOLDER / "measured" / "1x-nvidia-h100-80gb-hbm3"
    for name in ("peers.csv", "peers_configurations.csv"):
        (tmp_path / name).write_text((race / name).read_text())
    step = dict(zip(TABLES["peers-steps"].columns, ["measured", "case", "loop", 0, 0, 0, 1.0, 1.0], strict=True))
    (tmp_path / "peers_steps.csv").write_text(csv_text(list(step), [step]))
    written = take_reference(tmp_path / "peers.csv", tmp_path / "reference")
    assert sorted(path.name for path in written) == ["peers.csv", "peers_configurations.csv"]


def test_verdicts_over_several_machines_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="rows must be of one machine"):
        take_reference(training(tmp_path / "transparency.csv", ["box", "other"]), tmp_path / "reference")


def test_a_folder_is_taken_table_by_table(table, tmp_path):
    training(table.with_name("transparency.csv"), ["box"])
    for name in ("predictions.csv", "predictions_configurations.csv"):
        (table.parent / name).write_text((REFERENCE_FOLDER / "simulated/p40" / name).read_text())
    (table.parent / "verify.csv").write_text("cell,verdict\n")
    assert [path.stem for path in result_tables(table.parent)] == ["ablation", "predictions", "transparency"]
    call = ["datapackage", "take", str(table.parent), "--folder", str(tmp_path / "reference"), "--machine", "box"]
    with pytest.raises(SystemExit) as caught:
        main(call)
    assert caught.value.code == 0
    assert (tmp_path / "reference" / "simulated" / "p40" / "predictions.csv").is_file()
    assert (tmp_path / "reference" / "measured" / "box" / "ablation.csv").is_file()
    assert check_folder(tmp_path / "reference") == []


def test_a_folder_without_tables_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="folder must hold tables of rows, got none"):
        result_tables(tmp_path)
