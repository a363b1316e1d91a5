"""``compare A B`` on files and folders, in the terminal and as a table."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from gpipe_bench.bench.collect import write_tables
from gpipe_bench.cli import main
from tests.bench.cells_of import ok_result


def folder(path, scale=1.0, variants=("baseline",)):
    results = [ok_result(name, n, scale * (10 + n / 10)) for name in variants for n in range(4)]
    write_tables(results, "ablation", path / "ablation.csv")
    return path


@pytest.fixture
def sides(tmp_path):
    return folder(tmp_path / "a"), folder(tmp_path / "b", 2.0)


def call(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(["compare", *map(str, arguments)])
    return caught.value.code


def test_folders_are_compared_by_their_tables_of_rows(sides, capsys):
    assert call(*sides) == 0
    text = capsys.readouterr().out
    assert "2.000 [" in text
    assert "1 cells: 1 differs." in text
    assert "All 1 measured cells together: ratio 2.000" in text


def test_files_are_compared(sides, capsys):
    assert call(sides[0] / "ablation.csv", sides[0] / "ablation.csv") == 0
    assert "no difference shown" in capsys.readouterr().out


def test_check_is_for_scripts(sides, tmp_path, capsys):
    assert call(*sides, "--check") == 1
    assert call(sides[0], sides[0], "--check") == 0
    more = folder(tmp_path / "more", variants=("baseline", "dep-x-x"))
    assert call(sides[0], more, "--check") == 1
    assert "in B alone" in capsys.readouterr().out


def test_every_comparison_is_a_line_of_a_table(sides, tmp_path):
    out = tmp_path / "out.csv"
    metrics = ("throughput_samples_per_s", "peak_allocated_gib")
    assert call(*sides, "--out", out, *(word for name in metrics for word in ("--metric", name))) == 0
    with out.open(newline="") as file:
        found = {line["metric"]: line for line in csv.DictReader(file)}
    assert set(found) == set(metrics)
    speed = found["throughput_samples_per_s"]
    assert (float(speed["ratio"]), speed["n_new"], speed["verdict"]) == (2.0, "4", "differs")
    assert float(speed["ratio_low"]) < 2 < float(speed["ratio_high"])
    assert found["peak_allocated_gib"]["verdict"] == "equal"


def test_reasons_are_shown_for_failed_cells(tmp_path, capsys):
    made = ok_result("baseline", 0)
    failed = replace(made, row=replace(made.row, status="oom", reason="memory", throughput_samples_per_s=None))
    write_tables([failed], "ablation", tmp_path / "b.csv")
    write_tables([made], "ablation", tmp_path / "a.csv")
    assert call(tmp_path / "a.csv", tmp_path / "b.csv") == 0
    assert "ok in A, oom in B" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metric", "speed"], "metric must be a column of a row, got 'speed'"),
        (["--metric", "model"], "metric must be a column of numbers, got 'model'; use one of"),
        (["--across", "device"], "across must name keys of a cell, got 'device'"),
    ],
)
def test_bad_words_are_refused(sides, capsys, arguments, words):
    assert call(*sides, *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_folder_without_rows_is_refused(sides, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert call(sides[0], tmp_path / "empty") == 2
    assert "folder must hold tables of rows, got none" in capsys.readouterr().err
