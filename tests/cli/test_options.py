"""Options have limits, and a wish that is changed is said."""

from __future__ import annotations

import pytest

from gpipe_bench.cli import main
from tests.project.tree import ROOT

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
        ("balance", "--by", "time", "--partitions", "2", *SMALL, "--timeout", "inf"),
        ("balance", "--by", "time", "--partitions", "2", *SMALL, "--timeout", "nan"),
        ("balance", "--by", "size", "--partitions", "2", *SMALL, "--param-scale", "inf"),
        ("balance", "--by", "size", "--partitions", "2", *SMALL, "--batch-size", 10**30),
        ("balance", "--partitions", NINES, *SMALL),
        ("balance", "--partitions", "2", "--chunks", 10**30, *SMALL),
        ("gpu", "--device", "cpu", "--budget-s", "inf", "--out", "gpu"),
        ("run", "--repeats", 10**30, "--out", "a.json"),
        ("run", "--repeat", NINES, "--out", "a.json"),
        ("transparency", "collect", "a.json", "--out", "a.csv", "--margin", "nan"),
        ("transparency", "collect", "a.json", "--out", "a.csv", "--loss-margin", "-1"),
        ("transparency", "run", "unet", "--seeds", 10**9, "--out", "a.json"),
        ("figure", "tables", "--rows", SPEED, "--out", ""),
        ("figure", "tables", "--rows", SPEED, "--out", "/"),
        ("figure", "tables", "--rows", SPEED, "--out", "."),
        ("figure", "tables", "--rows", SPEED, "--out", "a/.."),
        ("figure", "tables", "--rows", SPEED, "--out", LONG),
        ("simulate-published", "unet-speed", "--out", LONG),
        ("datapackage", "take", LONG, "--folder", "f"),
        ("compare", SPEED, LONG),
        ("table", "--rows", LONG),
        ("simulate", "--trace", LONG),
        ("advise", "--rows", LONG),
        ("report", "--out", LONG),
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
    words = f"partitions=2,chunks={chunks},batch_size={batch_size},balance=auto"
    cells = ("--cell", words, "--cell", f"{words},variant=baseline", "--out", tmp_path / "a.json")
    assert called(("simulate-cells", "--model-args", small, *cells), capsys)[2] == said
    measured = ("--out", tmp_path / "b.json", "--model-args", small, "--partitions", 2, "--steps", 1, "--warmup", 0)
    assert called(("run", *measured, *size), capsys)[2] == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--repeat", 3, "--repeats", 1, "--variant", "dep-str-x", "--out", "a.json"), "repeat: 3 is not used"),
        (("transparency", "run", "unet", "--seed", 3, "--seeds", 1, "--out", "a.json"), "seed: 3 is not used"),
        (("gpu", "--tiny", "--config", "c.yaml", "--device", "cpu", "--out", "gpu"), "config: not used"),
        (("gpu", "--no-tests", "--tests", "t", "--device", "cpu", "--out", "gpu"), "tests: t is not used"),
    ],
)
def test_an_option_that_another_one_replaces_is_said(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gpipe_bench.cli.gpu.run_session", lambda options: 0)
    monkeypatch.setattr("gpipe_bench.bench.transparency.run.run_seeds", lambda *arguments: {})
    assert f"note: {said}" in called(arguments, capsys)[2]


@pytest.mark.parametrize(
    ("given", "backward", "schedule"),
    [
        ((), "autograd", "gpipe"),
        (("--schedule", "gpipe"), "scheduled", "gpipe"),
        (("--schedule", "1f1b"), "scheduled", "1f1b"),
        (("--backward", "scheduled"), "scheduled", "gpipe"),
        (("--backward", "autograd", "--schedule", "gpipe"), "autograd", "gpipe"),
    ],
)
def test_a_schedule_that_is_asked_for_drives_the_backward_pass(given, backward, schedule, tmp_path, monkeypatch):
    cells = []
    monkeypatch.setattr("gpipe_bench.cli.measure._run_once", lambda cell, repeat, out: cells.append(cell))
    with pytest.raises(SystemExit):
        main(["run", *SMALL, "--partitions", "2", "--out", str(tmp_path / "a.json"), *given])
    assert [(cell.backward, cell.schedule) for cell in cells] == [(backward, schedule)]
