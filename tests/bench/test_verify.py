"""Results are held to tolerances that are data; what is outside is named, and nothing goes unchecked."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from gpipe_bench.bench.tables import csv_text
from gpipe_bench.bench.verify import (
    CHECK_COLUMNS,
    Check,
    Tolerance,
    checks_of_claims,
    checks_of_predictions,
    checks_of_rows,
    judge,
    missing_cells,
    read_tolerances,
    records,
)
from gpipe_bench.cli import main
from gpipe_bench.errors import ConfigError
from gpipe_bench.rows import Row
from tests.bench.cells_of import ok_result
from tests.bench.test_config import ROOT

HEAD = "against,table,cell,metric,tolerance,reason\n"
PREDICTIONS = "table,experiment,metric,published,simulated,error_fraction,role\n"
ROW = replace(ok_result("dep-x-ptl").row, evidence="simulated", profile="p40")
EVERYTHING = [Tolerance("reference", "*", "*", "*", 1e-6)]


def check(expected, got):
    return Check("published", "speed", "n2m4", "throughput_samples_per_s", expected, got)


@pytest.mark.parametrize(
    ("expected", "got", "error"),
    [(10.0, 11.0, 0.1), (0.0, 0.25, 0.25), (None, None, 0.0), (None, 1.0, float("inf")), (1.0, None, float("inf"))],
)
def test_the_error_is_relative_and_running_out_of_memory_counts(expected, got, error):
    assert check(expected, got).error == pytest.approx(error)


@pytest.mark.parametrize(
    ("got", "limit", "verdict"),
    [(10.9, 0.1, "ok"), (11.1, 0.1, "OUTSIDE"), (8.9, 0.1, "OUTSIDE"), (99.0, float("inf"), "not required")],
)
def test_a_verdict(got, limit, verdict):
    (judged,) = judge([check(10.0, got)], [Tolerance("published", "*", "*", "*", limit)])
    assert judged.verdict == verdict


def test_the_first_tolerance_that_fits_decides():
    special, usual = Tolerance("published", "speed", "n2*", "*", 0.5), Tolerance("published", "*", "*", "*", 0.1)
    assert judge([check(10.0, 14.0)], [special, usual])[0].verdict == "ok"
    assert judge([check(10.0, 14.0)], [usual, special])[0].verdict == "OUTSIDE"


def test_what_no_tolerance_covers_is_a_problem():
    with pytest.raises(ConfigError, match="got none for published, speed, throughput_samples_per_s; add a line"):
        judge([check(1.0, 1.0)], [Tolerance("reference", "*", "*", "*", 0.1)])


def test_wrong_tolerances_are_all_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(HEAD + "published,*,*,*,-1,\nrumour,*,*,*,0.1,\npublished,*,*,*,x,\npublished,*,*,*,,\n")
    with pytest.raises(ConfigError) as caught:
        read_tolerances(path)
    assert [problem.split(" must")[0].rpartition(", ")[2] for problem in caught.value.problems] == [
        "line 2",
        "line 3",
        "line 4",
    ]


def test_rows_are_compared_with_those_of_the_same_cell():
    reference = [ROW, replace(ROW, chunks=64), replace(ROW, evidence="measured")]
    checks = list(checks_of_rows("sweep", [replace(ROW, throughput_samples_per_s=9.0)], reference))
    assert {found.cell for found in checks} == {"n2-m2-b4-except_last-dep-x-ptl"}
    outside = [found for found in judge(checks, EVERYTHING) if found.verdict == "OUTSIDE"]
    assert [found.metric for found in outside] == ["throughput_samples_per_s"]
    assert "sweep n2-m2-b4-except_last-dep-x-ptl throughput_samples_per_s: 9, reference 10" in outside[0].line()


def test_a_reference_cell_that_is_not_here_is_missing():
    reference = [ROW, replace(ROW, chunks=64), replace(ROW, evidence="measured", chunks=32)]
    (missing,) = missing_cells("sweep", [ROW], reference)
    assert (missing.verdict, missing.cell) == ("MISSING", "n2-m64-b4-except_last-dep-x-ptl")
    assert judge([missing], []) == [missing]
    assert missing.line() == f"MISSING: sweep {missing.cell}: a cell of the reference that is not here"
    (allowed,) = missing_cells("sweep", [ROW], reference, allowed=True)
    assert allowed.verdict == "left out"


def test_a_blank_says_why_it_is_blank():
    failed = replace(ROW, status="oom", reason="memory", throughput_samples_per_s=None)
    blank = replace(ROW, throughput_samples_per_s=None)
    for new, word in ((failed, "oom"), (blank, "no value")):
        (found,) = [c for c in checks_of_rows("sweep", [new], [ROW]) if c.metric == "throughput_samples_per_s"]
        assert f": {word}, reference 10, off by inf" in found.line()


def test_claims_are_their_largest_end(tmp_path):
    path = tmp_path / "verdict.csv"
    columns = ("model", "precision", "normalisation", "arm", "checkpoint", "deferred_batch_norm", "quantity")
    lines = ("unet,float32,batch,pipeline,always,True,loss,0.1,-0.5,0.3", "unet,float32,batch,accumulated,,,loss,,,0.1")
    path.write_text("\n".join((",".join((*columns, "estimate", "low", "high")), *lines)) + "\n")
    found = [(check.cell, check.expected, check.got) for check in checks_of_claims(path)]
    assert found == [("unet-float32-batch-always-deferred", 0.0, 0.5), ("unet-float32-batch-accumulated", 0.0, 0.1)]


def test_a_check_says_by_which_code_its_numbers_came_and_by_which_it_was_made(tmp_path):
    """Of the number that is checked, of the one that it is held to, and of the check itself."""
    new, old = replace(ROW, commit="b" * 40, dirty=True), replace(ROW, commit="a" * 40)
    facts = {"commit": "c" * 40, "dirty": False, "started_utc": "2026-01-01T00:00:00+00:00"}
    found = records(checks_of_rows("sweep", [new], [old]), {**facts, "torch": "2", "python": "3"})[0]
    assert tuple(found) == CHECK_COLUMNS
    assert (found["evidence"], found["commit"], found["dirty"]) == ("simulated", "b" * 40, True)
    assert (found["config_sha256"], found["expected_commit"]) == (ROW.config_sha256, "a" * 40)
    assert (found["checked_commit"], found["checked_dirty"]) == ("c" * 40, False)
    assert (found["checked_utc"], found["torch"], found["python"]) == ("2026-01-01T00:00:00+00:00", "2", "3")


def test_a_check_of_a_table_names_the_run_of_its_line(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text(
        PREDICTIONS.strip() + ",evidence,profile,commit,dirty,config_sha256\n"
        f"speed,n2m4,throughput_samples_per_s,10,11,0.1,predicted,simulated,p40,{'a' * 40},False,{'d' * 64}\n"
    )
    (found,) = checks_of_predictions(path)
    assert (found.evidence, found.profile, found.commit) == ("simulated", "p40", "a" * 40)
    assert (found.dirty, found.config_sha256) == (False, "d" * 64)


def test_an_empty_published_cell_ran_out_of_memory(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text(PREDICTIONS + "memory,baseline,peak_reserved_gib,,2.5,,predicted\n")
    (found,) = checks_of_predictions(path)
    assert (found.expected, found.got) == (None, 2.5)
    assert ": 2.5, published oom, off by inf" in found.line()
    path.write_text(PREDICTIONS + "memory,baseline,peak_reserved_gib,2.5,,,predicted\n")
    (found,) = checks_of_predictions(path)
    assert ": no value, published 2.5, off by inf" in found.line()


def test_the_reference_predictions_are_inside_the_tolerances():
    tolerances = read_tolerances(ROOT / "config/tolerances.csv")
    checks = judge(checks_of_predictions(ROOT / "results/reference/simulated/p40/predictions.csv"), tolerances)
    assert [found.line() for found in checks if found.verdict == "OUTSIDE"] == []
    assert sum(found.verdict == "not required" for found in checks) == 1


def test_the_command_fails_and_names_the_cell(tmp_path, capsys):
    (tmp_path / "predictions.csv").write_text(PREDICTIONS + "speed,n2m4,throughput_samples_per_s,10,20,1,predicted\n")
    (tmp_path / "t.csv").write_text(HEAD + "published,*,*,*,0.1,\nreference,*,*,*,0,\n")
    reference = tmp_path / "reference" / "simulated" / "p40"
    reference.mkdir(parents=True)
    for folder in (tmp_path, reference):
        (folder / "sweep.csv").write_text(csv_text(Row.columns(), [ROW.to_dict()]))
    words = ["--predictions", "predictions.csv", "--tolerances", "t.csv", "--out", "v.csv", "--reference"]
    arguments = [str(tmp_path / word) if word.endswith(".csv") else word for word in words]
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments, str(tmp_path / "reference"), str(tmp_path / "sweep.csv")])
    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert "OUTSIDE: speed n2m4 throughput_samples_per_s: 20, published 10, off by 1, allowed 0.1" in printed
    with (tmp_path / "v.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["verdict"] for line in lines} == {"OUTSIDE", "ok"}
    assert all(line["checked_utc"] and line["torch"] and line["python"] for line in lines)


def test_the_command_fails_where_cells_are_missing_unless_a_part_is_allowed(tmp_path, capsys):
    reference = tmp_path / "reference" / "simulated" / "p40"
    reference.mkdir(parents=True)
    cells = [replace(ROW, chunks=m) for m in range(1, 10)]
    for folder, rows in ((reference, cells), (tmp_path, cells[:2])):
        (folder / "sweep.csv").write_text(csv_text(Row.columns(), [row.to_dict() for row in rows]))
    (tmp_path / "t.csv").write_text(HEAD + "reference,*,*,*,0,\n")
    places = {"--tolerances": "t.csv", "--out": "v.csv", "--reference": "reference"}
    words = ["verify", *(w for name, place in places.items() for w in (name, str(tmp_path / place)))]

    def status(*more):
        with pytest.raises(SystemExit) as ended:
            main([*words, str(tmp_path / "sweep.csv"), *more])
        return ended.value.code

    assert status() == 1
    printed = capsys.readouterr().err
    assert printed.count("MISSING: sweep n2-m") == 5
    assert "and 2 more cells of sweep that are not here" in printed
    assert "7 MISSING, 16 ok" in printed
    assert status("--part", "other") == 2
    assert "--part must be one of all, sweep, got other" in capsys.readouterr().err
    assert status("--part", "sweep") == 0
    assert "7 left out, 16 ok" in capsys.readouterr().out
