"""Results are held to tolerances that are data; what is outside is named, and nothing goes unchecked."""

from __future__ import annotations

import csv
import re
import shutil
from dataclasses import replace

import pytest

from gpipe_bench.cli import main
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import csv_text, frame_of, read_table
from gpipe_bench.suite.evaluation.verify import (
    CHECK_COLUMNS,
    Check,
    Tolerance,
    checks_of_claims,
    checks_of_predictions,
    checks_of_rows,
    judge,
    left_out,
    read_tolerances,
    records,
)
from tests.suite.cells_of import ok_result
from tests.suite.test_config import ROOT

HEAD = "against,table,cell,metric,tolerance,reason\n"
PREDICTIONS = "table,experiment,metric,published,simulated,error_fraction,role\n"
ROW = replace(ok_result("dep-x-ptl").row, evidence="simulated", profile="p40")
CLAIMS = "model,precision,normalisation,arm,checkpoint,deferred_batch_norm,quantity,estimate,low,high\n"
REFERENCE = ROOT / "results/reference/simulated/p40/predictions.csv"
EVERYTHING = [Tolerance("reference", "*", "*", "*", 1e-6)]


def missing_in(checks):
    return [found for found in checks if found.verdict == "MISSING"]


def table(*rows):
    return frame_of(rows, Row)


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
    [
        (10.9, 0.1, "ok"),
        (11.1, 0.1, "OUTSIDE"),
        (8.9, 0.1, "OUTSIDE"),
        (99.0, float("inf"), "not required"),
        (float("nan"), 0.1, "OUTSIDE"),
        (float("nan"), float("inf"), "OUTSIDE"),
    ],
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
    path.write_text(HEAD + "published,a,*,*,-1,\nrumour,*,*,*,0.1,\npublished,b,*,*,x,\npublished,*,*,*,,\n")
    with pytest.raises(ConfigError) as caught:
        read_tolerances(path)
    assert [problem.removeprefix(f"{path}, ").partition(" must")[0] for problem in caught.value.problems] == [
        "line 2: tolerance",
        "line 3: against",
        "line 4: tolerance",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD, "must have at least one row, got a header alone"),
        (
            HEAD + "published,*,*,*,0.1,\npublished,*,*,*,0.9,\n",
            "line 3: line must differ in against or table or cell or metric from",
        ),
    ],
)
def test_tolerances_that_are_not_data_are_refused(tmp_path, text, words):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_tolerances(path)


def test_rows_are_compared_with_those_of_the_same_cell():
    reference = [ROW, replace(ROW, chunks=64), replace(ROW, evidence="measured")]
    checks = list(checks_of_rows("sweep", table(replace(ROW, throughput_samples_per_s=9.0)), table(*reference)))
    assert {found.cell for found in checks if not found.verdict} == {"n2-m2-b4-except_last-dep-x-ptl"}
    outside = [found for found in judge(checks, EVERYTHING) if found.verdict == "OUTSIDE"]
    assert [found.metric for found in outside] == ["throughput_samples_per_s"]
    assert "sweep n2-m2-b4-except_last-dep-x-ptl throughput_samples_per_s: 9, reference 10" in outside[0].line()


def test_a_reference_cell_that_is_not_here_is_missing():
    reference = [ROW, replace(ROW, chunks=64), replace(ROW, evidence="measured", chunks=32)]
    (missing,) = missing_in(checks_of_rows("sweep", table(ROW), table(*reference)))
    assert (missing.verdict, missing.cell) == ("MISSING", "n2-m64-b4-except_last-dep-x-ptl")
    assert judge([missing], []) == [missing]
    assert missing.line() == f"MISSING: sweep {missing.cell}: a cell of the reference that is not here"
    allowed = left_out(missing)
    assert allowed.verdict == "left out"


def test_a_cell_of_another_schedule_is_another_cell():
    other = table(replace(ROW, schedule="1f1b"))
    assert [found.verdict for found in checks_of_rows("sweep", table(ROW), other)] == ["MISSING"]


def test_a_blank_says_why_it_is_blank():
    failed = replace(ROW, status="oom", reason="memory", throughput_samples_per_s=None)
    blank = replace(ROW, throughput_samples_per_s=None)
    for new, word in ((failed, "oom"), (blank, "no value")):
        (found,) = [
            c for c in checks_of_rows("sweep", table(new), table(ROW)) if c.metric == "throughput_samples_per_s"
        ]
        assert f": {word}, reference 10, off by inf" in found.line()


def test_claims_are_their_largest_end(tmp_path):
    path = tmp_path / "verdict.csv"
    lines = ("unet,float32,batch,pipeline,always,True,loss,0.1,-0.5,0.3", "unet,float32,batch,accumulated,,,loss,,,0.1")
    path.write_text(CLAIMS + "\n".join(lines) + "\n")
    found = [(check.cell, check.expected, check.got) for check in checks_of_claims(path)]
    assert found == [("unet-float32-batch-always-deferred", 0.0, 0.5), ("unet-float32-batch-accumulated", 0.0, 0.1)]


def test_a_check_says_by_which_code_its_numbers_came_and_by_which_it_was_made(tmp_path):
    """Of the number that is checked, of the one that it is held to, and of the check itself."""
    new, old = replace(ROW, commit="b" * 40, dirty=True), replace(ROW, commit="a" * 40)
    facts = {"commit": "c" * 40, "dirty": False, "started_utc": "2026-01-01T00:00:00+00:00"}
    found = records(checks_of_rows("sweep", table(new), table(old)), {**facts, "torch": "2", "python": "3"})[0]
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
    paths = sorted((ROOT / "results/reference/simulated").glob("*/predictions.csv"))
    assert len(paths) == 4
    checks = judge([check for path in paths for check in checks_of_predictions(path)], tolerances)
    assert [found.line() for found in checks if found.verdict == "OUTSIDE"] == []
    free = [found for found in checks if found.verdict == "not required"]
    assert {found.table for found in free} == {"amoebanet-d-speed", "llm-foundry-h100"}
    assert sum(found.table == "amoebanet-d-speed" for found in free) == 1


def test_the_reference_verdicts_are_inside_the_tolerances():
    tolerances = read_tolerances(ROOT / "config/tolerances.csv")
    (path,) = (ROOT / "results/reference/measured").glob("*/transparency_verdict.csv")
    checks = judge(checks_of_claims(path, [path], tolerances), tolerances)
    assert any("-float64-" in found.cell for found in checks)
    assert [found.line() for found in checks if found.verdict in ("OUTSIDE", "MISSING")] == []


@pytest.mark.parametrize(
    ("reader", "text", "words"),
    [
        (
            checks_of_predictions,
            PREDICTIONS + "a,b,c,1,1,0,fitted\na,b,d,1,fast,0,fitted\n",
            "line 3: simulated must be of type float, got 'fast'",
        ),
        (
            checks_of_claims,
            CLAIMS + "unet,float32,batch,plain,,,loss,0,low,0\n",
            "low must be of type float, got 'low'",
        ),
        (
            checks_of_claims,
            CLAIMS + "unet,float32,batch,plain,,,loss,,,\n",
            "2 must hold a number in one of .*, got none for loss",
        ),
    ],
)
def test_what_is_no_number_is_named(tmp_path, reader, text, words):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        reader(path)


def test_a_line_of_the_reference_predictions_that_is_not_here_is_missing(tmp_path):
    path = tmp_path / "predictions.csv"
    lines = REFERENCE.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("unet-speed,pipeline-4,")))
    (missing,) = missing_in(checks_of_predictions(path, [REFERENCE]))
    name = "unet-speed pipeline-4 throughput_samples_per_s"
    assert missing.line() == f"MISSING: {name}: a line of the reference that is not here"
    assert left_out(missing).verdict == "left out"
    assert missing_in(checks_of_predictions(REFERENCE, [REFERENCE])) == []


def test_predictions_are_held_to_those_of_the_reference_too(tmp_path):
    """A wrong digit may be nearer to print than the tolerance of print."""
    path = tmp_path / "predictions.csv"
    number = checks_of_predictions(REFERENCE)[0].got
    path.write_text(REFERENCE.read_text().replace(f",{number:.6g},", f",{number * 1.01:.6g},", 1))
    checks = [found for found in checks_of_predictions(path, [REFERENCE]) if found.against == "reference"]
    assert len(checks) == len(checks_of_predictions(REFERENCE))
    outside = [found for found in judge(checks, EVERYTHING) if found.verdict == "OUTSIDE"]
    assert [(found.expected, found.got) for found in outside] == [(number, pytest.approx(number * 1.01, rel=1e-5))]


@pytest.mark.parametrize("column", ["microbatches", "device_count"])
def test_what_follows_from_the_setting_is_compared(column):
    checks = list(checks_of_rows("sweep", table(replace(ROW, **{column: 7})), table(replace(ROW, **{column: 2}))))
    assert [found.metric for found in judge(checks, EVERYTHING) if found.verdict == "OUTSIDE"] == [column]


@pytest.mark.parametrize("name", ["speed", "predictions"])
def test_a_digest_without_its_configuration_is_refused(tmp_path, capsys, name):
    for suffix in ("", "_configurations"):
        shutil.copy(REFERENCE.with_name(f"{name}{suffix}.csv"), tmp_path)
    path = tmp_path / f"{name}.csv"
    call = ["verify", *(["--predictions"] if name == "predictions" else []), str(path)]
    call += ["--reference", str(ROOT / "results/reference"), "--out", str(tmp_path / "v.csv"), "--part", "all"]
    with pytest.raises(SystemExit) as ended:
        main(call)
    assert ended.value.code in (0, None)
    text = path.read_text()
    key = re.search("[0-9a-f]{64}", text).group()
    path.write_text(text.replace(key, key[:-1] + ("0" if key[-1] != "0" else "1"), 1))
    with pytest.raises(SystemExit) as ended:
        main(call)
    assert ended.value.code == 2
    assert (
        f"{path}, line 2 must have a digest of a configuration in {name}_configurations.csv" in capsys.readouterr().err
    )


def test_a_claim_that_is_held_to_something_must_be_there_for_each_model(tmp_path):
    held, free = "unet,float32,batch,accumulated,,,loss,0,0,0\n", "unet,float32,batch,accumulated,,,time,1,1,1\n"
    tolerances = [Tolerance("claim", "*", "*-float32-*", "loss", 0.0), Tolerance("claim", "*", "*", "*", float("inf"))]
    reference, path = tmp_path / "reference.csv", tmp_path / "verdict.csv"
    reference.write_text(CLAIMS + held + free + held.replace("unet", "vit"))
    path.write_text(CLAIMS + free.replace("time", "updates"))
    (missing,) = missing_in(checks_of_claims(path, [reference], tolerances))
    assert (missing.cell, missing.metric, missing.verdict) == ("unet-float32-batch-accumulated", "loss", "MISSING")
    path.write_text(CLAIMS + held)
    assert missing_in(checks_of_claims(path, [reference], tolerances)) == []


def test_a_quantity_that_the_tolerances_require_must_be_there_without_a_reference_too(tmp_path):
    path = tmp_path / "verdict.csv"
    path.write_text(CLAIMS + "vit,float32,batch,accumulated,,,time,1,1,1\n")
    found = missing_in(checks_of_claims(path, [], read_tolerances(ROOT / "config/tolerances.csv")))
    assert {check.metric for check in found} == {
        "gradient_difference_accumulated_largest",
        "loss_difference_accumulated_largest",
        "loss_last_to_accumulated",
    }
    assert {(check.cell, check.verdict) for check in found} == {("vit", "MISSING")}


def test_the_command_fails_where_lines_of_predictions_are_missing(tmp_path, capsys):
    path = tmp_path / "predictions.csv"
    path.write_text("".join(REFERENCE.read_text().splitlines(keepends=True)[:-1]))
    call = ["verify", "--predictions", str(path), "--reference", str(ROOT / "results/reference")]
    call += ["--tolerances", str(ROOT / "config/tolerances.csv"), "--out", str(tmp_path / "v.csv")]
    for words, status in (((), 1), (("--part", "predictions"), 0)):
        with pytest.raises(SystemExit) as ended:
            main([*call, *words])
        assert ended.value.code == status
    assert "run the rest of it, or allow a part: --part predictions" in capsys.readouterr().err


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
    assert "\nerror: " in printed
    assert "OUTSIDE: speed n2m4 throughput_samples_per_s: 20, published 10, off by 1, allowed 0.1" in printed
    with (tmp_path / "v.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["verdict"] for line in lines} == {"OUTSIDE", "ok"}
    assert all(line["checked_utc"] and line["torch"] and line["python"] for line in lines)


def test_the_command_fails_where_cells_are_missing_unless_a_part_is_allowed(tmp_path, capsys):
    reference = tmp_path / "reference" / "simulated" / "p40"
    reference.mkdir(parents=True)
    cells = [replace(ROW, chunks=m, cell=f"m{m}") for m in range(1, 10)]
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
    assert "error: 27 checks: 7 MISSING, 20 ok" in printed
    assert status("--part", "other") == 2
    assert "--part must be one of all, sweep, got other" in capsys.readouterr().err
    assert status("--part", "sweep") == 0
    assert "7 left out, 20 ok" in capsys.readouterr().out


@pytest.mark.parametrize("profile", ["p40", "h100"])
def test_every_value_of_the_schedules_is_its_own_reference(profile):
    """Cells that differ in precision, optimizer or the kind of steps alone are different cells."""
    rows = read_table(ROOT / "results/reference/simulated" / profile / "schedules.csv", records=Row)
    checks = list(checks_of_rows("schedules", rows, rows))
    assert len(checks) > 5 * len(rows)
    assert [check for check in checks if check.error] == []
