"""``datapackage check --table`` accepts rows as a run leaves them, and names what is wrong with others."""

from __future__ import annotations

import shutil

import pytest

from gpipe_bench.cli import main
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.rows import PeerRow
from gpipe_bench.results.schema import TABLES
from gpipe_bench.results.tables import csv_text, read_records
from gpipe_bench.suite.datapackage.check import check_sent, check_taken
from gpipe_bench.suite.datapackage.take import take_reference

REFERENCE = REFERENCE_FOLDER / "measured"
GOOD = (
    "2x-amd-epyc/peers.csv",
    *(f"2x-intel-xeon-processor/{name}.csv" for name in ("ablation", "schedules", "sweep_measured")),
)


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


def test_a_row_unlike_its_steps_is_named(table, capsys):
    """Throughput ten times as high and step time a tenth of it agree with each other, but not with the steps."""
    edit(table, ",10.0,400.0,", ",100.0,40.0,")
    with pytest.raises(SystemExit) as caught:
        main(["datapackage", "check", "--table", str(table)])
    assert caught.value.code == 1
    (problem,) = check_sent(table)
    assert problem in capsys.readouterr().err
    assert problem.startswith("ablation.csv, line 2, repeat 0 of cell measured-unet-baseline-")
    assert problem.endswith(
        "got 40 ms and 100 samples/s, but ablation_steps.csv gives 400 ms and 10 samples/s; measure it again"
    )


def test_each_row_unlike_its_steps_has_a_line(table):
    edit(table, ",10.0,400.0,", ",100.0,40.0,")
    edit(table, ",10.0,400.0,", ",10.01,399.6,")  # rounding does not explain it
    assert [problem.split(",")[1] for problem in check_sent(table)] == [" line 2", " line 4"]


def test_a_row_whose_steps_are_missing_is_named(table):
    steps = table.with_name("ablation_steps.csv")
    steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:-3]))
    (problem,) = check_sent(table)
    assert problem.startswith("ablation.csv, line 4, repeat 0 of cell measured-unet-dep-x-ptl-")
    assert "got none in ablation_steps.csv" in problem


def test_rows_without_steps_beside_them_are_accepted(table):
    table.with_name("ablation_steps.csv").unlink()
    assert check_sent(table) == []


def test_a_race_has_the_median_of_its_rounds(tmp_path):
    """The rounds have medians of 0.5, 1 and 4.5 step times."""
    race = REFERENCE / "2x-amd-epyc"
    for name in ("peers.csv", "peers_configurations.csv"):
        shutil.copy(race / name, tmp_path)
    rows = read_records(tmp_path / "peers.csv", (), PeerRow)
    columns = TABLES["peers-steps"].columns
    parts = [(0, 0.4), (0, 0.5), (0, 0.6), (1, 1.0), (2, 4.0), (2, 4.5), (2, 5.0), (2, 6.0), (2, 4.2)]
    records = [
        dict(zip(columns, ("measured", row.case, row.contender, turn, 0, k, part * row.step_time_ms, 1.0), strict=True))
        for row in rows
        if row.status == "ok"
        for k, (turn, part) in enumerate(parts)
    ]
    steps = tmp_path / "peers_steps.csv"
    steps.write_text(csv_text(columns, records))
    assert check_sent(tmp_path / "peers.csv") == []
    steps.write_text(csv_text(columns, [{**one, "round": 0} for one in records]))
    assert len(check_sent(tmp_path / "peers.csv")) == len(records) // len(parts)


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
