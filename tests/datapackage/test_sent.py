"""``datapackage check --table`` accepts rows as a run leaves them, and names what is wrong with others."""

from __future__ import annotations

import shutil

import pytest

from gpipe_bench.cli import main
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.suite.datapackage.check import check_sent, check_taken
from gpipe_bench.suite.datapackage.take import take_reference

REFERENCE = REFERENCE_FOLDER / "measured"
GOOD = ("2x-amd-epyc/peers.csv", "2x-intel-xeon-processor/ablation.csv", "2x-intel-xeon-processor/schedules.csv")


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_rows_of_a_run_are_accepted_and_can_be_taken(table, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["datapackage", "check", "--table", str(table)])
    assert not caught.value.code
    assert capsys.readouterr().out == "rows can be taken\n"
    taken = take_reference(table, tmp_path / "package", "box")
    assert check_sent(taken[0]) == []


@pytest.mark.parametrize("name", GOOD)
def test_reference_rows_of_clean_commits_are_accepted(name):
    assert check_sent(REFERENCE / name) == []


def test_reference_rows_of_a_changed_commit_would_not_be():
    (problem,) = check_sent(REFERENCE / "1x-nvidia-h100-80gb-hbm3/ablation.csv")
    assert problem == "ablation.csv, line 2 and in 7 more: dirty must be False, got True; measure it again"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (f",{'0' * 40},False,", f",{'0' * 40},True,", "line 2: dirty must be False, got True"),
        (f",{'0' * 40},", ",main,", "line 2: commit must be 40 hexadecimal digits, got main"),
        (",3.11.7,", ",,", "line 2: python must be given in a measured row that is ok"),
        ("ablation,measured,", "ablation,simulated,", "line 2: evidence must be measured, got simulated"),
        (
            ",10.0,400.0,",
            ",100.0,400.0,",
            "line 2: throughput_samples_per_s must be batch_size / step_time_ms, got 100",
        ),
        (",10.0,400.0,", ",10.0,,", "line 2: step_time_ms must be there, got none"),
    ],
)
def test_a_row_that_cannot_be_trusted_is_named(table, capsys, old, new, words):
    edit(table, old, new)
    with pytest.raises(SystemExit) as caught:
        main(["datapackage", "check", "--table", str(table)])
    assert caught.value.code == 1
    errors = capsys.readouterr().err
    assert f"error: ablation.csv, {words}" in errors


def test_take_refuses_measured_rows_that_the_check_refuses_and_writes_nothing(table, tmp_path, capsys):
    good = table.with_name("good.csv")
    for path in table.parent.glob("ablation*.csv"):
        shutil.copy(path, path.with_name(path.name.replace("ablation", "good")))
    edit(table, f",{'0' * 40},False,", f",{'0' * 40},True,")
    folder = tmp_path / "reference"
    with pytest.raises(SystemExit) as caught:
        main(["datapackage", "take", str(good), str(table), "--folder", str(folder)])
    assert caught.value.code == 1
    assert "error: ablation.csv, line 2: dirty must be False, got True" in capsys.readouterr().err
    assert not folder.exists()


def test_rows_of_other_evidence_are_taken_beside_measured_ones(table):
    edit(table, "ablation,measured,", "ablation,simulated,")
    edit(table, f",{'0' * 40},False,", f",{'0' * 40},True,")  # of the row that is simulated now
    assert check_taken(table) == []
    edit(table, f",{'0' * 40},False,", f",{'0' * 40},True,")
    assert check_taken(table) == ["ablation.csv, line 3: dirty must be False, got True; measure it again"]


def test_a_row_of_another_configuration_is_named(table):
    path = table.with_name("ablation_configurations.csv")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    (problem,) = check_sent(table)
    assert "config_sha256 must be one of ablation_configurations.csv" in problem


def test_a_configuration_that_was_changed_is_named(table):
    edit(table.with_name("ablation_configurations.csv"), '""threads"": 1', '""threads"": 2')
    assert "config_sha256 must be the digest of the configuration" in check_sent(table)[0]


def test_a_value_against_its_column_is_named(table):
    edit(table, ",10.0,400.0,", ",fast,400.0,")
    with pytest.raises(ConfigError, match="throughput_samples_per_s"):
        check_sent(table)


def test_a_row_that_is_there_twice_is_named(table):
    table.write_text(table.read_text() + table.read_text().splitlines()[-1] + "\n")
    with pytest.raises(ConfigError, match="line must differ"):
        check_sent(table)


def test_a_table_that_has_no_rows_of_runs_is_refused(table, tmp_path):
    steps = table.with_name("ablation_steps.csv")
    with pytest.raises(ConfigError, match="table must be one of rows, got steps"):
        check_sent(steps)


def test_rows_without_their_configurations_are_refused(table, tmp_path):
    alone = shutil.copy(table, tmp_path / "ablation.csv")
    with pytest.raises(ConfigError, match="ablation_configurations"):
        check_sent(alone)
