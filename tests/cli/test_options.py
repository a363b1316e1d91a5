"""Options have limits, and a wish that is changed is said."""

from __future__ import annotations

import pytest

from gpipe_bench.cli import main
from tests.project.tree import ROOT
from tests.suite.cells_of import ok_result

SPEED = ROOT / "results" / "reference" / "simulated" / "p40" / "speed.csv"
SMALL = ("--model-args", "depth=1;B=1;C=2;size=4")
NINES = "9" * 5000
LONG = "a" * 300


def called(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, arguments)))
    printed = capsys.readouterr()
    return caught.value.code or 0, printed.out, printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("balance", "--by", "time", "--partitions", "2", *SMALL, "--timeout", "nan"),
        ("balance", "--partitions", NINES, *SMALL),
        ("run", "--budget-s", "inf", "--out", "a.json"),
        ("run", "--repeat", NINES, "--out", "a.json"),
        ("figure", "tables", "--rows", SPEED, "--out", ""),
        ("figure", "tables", "--rows", SPEED, "--out", LONG),
        ("datapackage", "take", LONG, "--folder", "f"),
        ("table", "--rows", LONG),
        ("simulate", "--trace", LONG),
        ("simulate", "--profile", LONG),
        ("simulate", "--model-args", f"depth={NINES}"),
    ],
)  # fmt: skip
def test_a_value_beyond_its_limits_is_one_short_line(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = called(arguments, capsys)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert len(err) < 1000
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "/data/x.csv"), "No space left on device (/data/x.csv)"),
        (PermissionError(13, "Permission denied", "/data/x"), "Permission denied (/data/x)"),
        (MemoryError(), "memory must suffice, got: MemoryError"),
        (OverflowError("int too large"), "numbers must suffice, got: int too large"),
    ],
)
def test_what_the_system_refuses_is_one_line(error, words, capsys, monkeypatch):
    def fail(path, columns):
        raise error

    monkeypatch.setattr("gpipe_bench.figures.tables.is_race", lambda path: False)
    monkeypatch.setattr("gpipe_bench.figures.tables.read_rows", fail)
    status, _, err = called(("table", "--rows", SPEED), capsys)
    assert status == 2
    assert words in err
    assert err.count("\n") == 1


def test_a_fault_of_the_program_is_not_hidden(monkeypatch):
    def fail(path):
        raise KeyError("a fault")

    monkeypatch.setattr("gpipe_bench.figures.tables.is_race", fail)
    with pytest.raises(KeyError, match="a fault"):
        main(["table", "--rows", str(SPEED)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("emulate", "--cells", "a.json", "--trace", "a", "--races"),
            "with --cells must be left out, got --trace, --races",
        ),
        (("emulate", "--only", "a"), "without --cells must be left out, got --only; leave it out"),
        (("emulate", "--races"), "without a script must be left out, got --races"),
        (("emulate", "a.py", "--cells", "a.json", "--out", "a"), "with a script must be left out, got --cells, --out"),
        (("run", "--out", "a.json", "--only", "a"), "without --cells must be left out, got --only"),
    ],
)
def test_options_that_do_nothing_are_refused(arguments, words, capsys):
    status, _, err = called(arguments, capsys)
    assert (status, f"options that do nothing {words}" in err) == (2, True)


@pytest.mark.parametrize(
    ("chunks", "batch_size", "said"),
    [
        (1000, 8, "note: chunks: 1000 asked for, 8 used, since the batch has 8 samples\n"),
        (5, 8, "note: chunks: 5 asked for, 4 used, since the batch has 8 samples and the micro-batches 2 each\n"),
        (4, 8, ""),
    ],
)
def test_chunks_that_a_batch_does_not_give_are_said(chunks, batch_size, said, capsys, tmp_path):
    size = ("--chunks", chunks, "--batch-size", batch_size)
    small = "depth=1;B=1;C=2;size=16"
    status, out, err = called(("simulate", "--model-args", small, *size), capsys)
    assert (status, err) == (0, said)
    assert "samples/s" in out
    assert called(("balance", "--partitions", 2, "--model-args", small, *size), capsys)[2] == said
    measured = ("--out", tmp_path / "b.json", "--model-args", small, "--partitions", 2, "--steps", 1, "--warmup", 0)
    assert called(("run", *measured, *size), capsys)[2] == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--repeat", 3, "--repeats", 1, "--variant", "dep-str-x", "--out", "a.json"), "repeat: 3 is not used"),
    ],
)
def test_an_option_that_another_one_replaces_is_said(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"note: {said}" in called(arguments, capsys)[2]


@pytest.mark.parametrize(
    ("given", "schedule", "partitions"),
    [
        ((), None, 4),
        (("--schedule", "1f1b"), "1f1b", 4),
        (("--balance", "53"), None, 1),
        (("--processes", "3"), "gpipe", 3),
        (("--processes", "2", "--schedule", "zb_v"), "zb_v", 4),
    ],
)
def test_options_imply_others(given, schedule, partitions, tmp_path, monkeypatch):
    cells = []

    def run_once(cell, *_):
        cells.append(cell)
        return ok_result()

    monkeypatch.setattr("gpipe_bench.cli.measure._run_once", run_once)
    with pytest.raises(SystemExit):
        main(["run", "--out", str(tmp_path / "a.json"), *given])
    assert [(cell.schedule, cell.partitions) for cell in cells] == [(schedule, partitions)]
    assert sum(cells[0].balance) == 53
