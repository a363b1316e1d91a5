"""``compare A B`` on files and folders, in the terminal and as a table."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from gpipe_bench.cli import main
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import csv_text
from gpipe_bench.suite.evaluation.collect import write_tables
from tests.suite.cells_of import ok_result


def folder(path, scale=1.0, variants=("baseline",), repeats=4):
    results = [ok_result(name, n, scale * (10 + n / 10)) for name in variants for n in range(repeats)]
    write_tables(results, "ablation", path / "ablation.csv")
    return path


@pytest.fixture
def sides(tmp_path):
    return folder(tmp_path / "a"), folder(tmp_path / "b", 2.0)


def call(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(["compare", *map(str, arguments)])
    return caught.value.code


def words(capsys):
    """What was printed, on one line."""
    return " ".join(capsys.readouterr().out.split())


def test_folders_are_compared_by_their_tables_of_rows(sides, capsys):
    assert call(*sides) == 0
    text = capsys.readouterr().out
    assert "2.000 [" in text
    assert "1 cells: 1 differs." in text
    assert "Verdict: the two sets differ: 1 differs" in text


def test_files_are_compared(sides, capsys):
    assert call(sides[0] / "ablation.csv", sides[0] / "ablation.csv") == 0
    assert "Verdict: no difference shown." in capsys.readouterr().out


NAMES = ("baseline", "dep-x-x", "dep-x-ptl", "x-x-ptl", "x-x-x-x-x")


def test_what_cannot_be_told_is_said_and_has_a_status_of_its_own(tmp_path, capsys):
    side = folder(tmp_path / "a", variants=NAMES, repeats=2)
    assert call(side, side, "--check") == 3
    text = words(capsys)
    assert "5 cells: 5 too few repeats." in text
    assert "Verdict: cannot tell: throughput_samples_per_s: 5 of 5 measured cells have too few repeats." in text


@pytest.mark.parametrize(
    ("cells", "repeats", "said"),
    [
        (1, 1, "a difference shows from 4 repeats on each side on"),
        (5, 2, "a difference of one of these 5 cells alone shows from 5 repeats on each side on"),
    ],
)
def test_how_many_repeats_would_do_is_said(tmp_path, capsys, cells, repeats, said):
    sides = [folder(tmp_path / name, scale, NAMES[:cells], repeats) for name, scale in (("a", 1.0), ("b", 1.01))]
    assert call(*sides) == 0
    assert said in words(capsys)


def simulated(path, rows):
    path.write_text(csv_text(Row.columns(), [row.to_dict() for row in rows]))
    return path


@pytest.fixture
def long_rows():
    """Simulated cells of balances that are longer than a line."""
    row = replace(ok_result("dep-str-ptl").row, evidence="simulated", profile="p40", partitions=64)
    return [replace(row, chunks=m, balance="-".join(str(m + j % 7) for j in range(64))) for m in (8, 16, 32)]


def test_equal_cells_are_counted_and_shown_on_demand(tmp_path, long_rows, capsys):
    path = simulated(tmp_path / "a.csv", long_rows)
    assert call(path, path, "--check") == 0
    text = capsys.readouterr().out
    assert "Verdict: equal." in text
    assert "ratio B/A" not in text
    assert call(path, path, "--all") == 0
    assert capsys.readouterr().out.count("ratio B/A") >= 2


def test_ratio_and_verdict_are_shown_beside_long_balances(tmp_path, long_rows, capsys):
    """Where settings are the same but for the balance, it is shown by its ends."""
    rows = [*long_rows, *(replace(row, balance=f"7-{row.balance.partition('-')[2]}") for row in long_rows)]
    fast = [replace(row, throughput_samples_per_s=11.0) for row in rows]
    assert call(simulated(tmp_path / "a.csv", rows), simulated(tmp_path / "b.csv", fast)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("differs")]
    assert len(lines) == 6
    assert all("1.1000" in line and "(64)" in line and len(line) <= 150 for line in lines)
    assert "7-9-10-...-14-8 (64)" in lines[3]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_digit_is_lost_whatever_the_width(tmp_path, long_rows, capsys, monkeypatch, width):
    names = [*long_rows, *(replace(row, variant="dep-x-ptl-x-rec", checkpoint="never") for row in long_rows)]
    fast = [replace(row, throughput_samples_per_s=12345.6) for row in names]
    sides = simulated(tmp_path / "a.csv", names), simulated(tmp_path / "b.csv", fast)
    monkeypatch.setenv("COLUMNS", str(width))
    assert call(*sides) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("dep-str-ptl ", "dep-x-ptl-x-rec "))]
    for value in ("1.235e+04", "1234.5600", "differs"):
        assert sum(value in words for words in rows) == 6


@pytest.mark.parametrize(("scale", "ratio"), [(1 + 2e-7, "1 + 2.0e-07"), (1 - 2e-7, "1 - 2.0e-07"), (1.5, "1.5000")])
def test_digits_are_enough_to_see_a_difference(tmp_path, long_rows, capsys, scale, ratio):
    rows = long_rows[:1]
    other = [replace(row, throughput_samples_per_s=row.throughput_samples_per_s * scale) for row in rows]
    assert call(simulated(tmp_path / "a.csv", rows), simulated(tmp_path / "b.csv", other)) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith("differs")]
    assert ratio in line
    assert f"{10 * scale:.8g}" in line.split()


def test_many_cells_that_one_side_lacks_are_counted(tmp_path, long_rows, capsys):
    rows = [replace(long_rows[0], batch_size=8 * k) for k in range(1, 13)]
    a, b = simulated(tmp_path / "a.csv", rows), simulated(tmp_path / "b.csv", rows[:1])
    assert call(a, b, "--metric", "throughput_samples_per_s", "--check") == 1
    text = words(capsys)
    assert "11 cells in A alone (--all: each of them)" in text
    assert text.count("in A alone") == 1
    assert call(a, b, "--metric", "throughput_samples_per_s", "--all") == 0
    assert capsys.readouterr().out.count("in A alone") == 11
    assert call(a, simulated(tmp_path / "c.csv", rows[:2]), "--metric", "throughput_samples_per_s") == 0
    assert capsys.readouterr().out.count("in A alone") == 10


def test_what_counts_as_equal_is_said(tmp_path, long_rows, capsys):
    """The last digits of a sum may differ, and nothing more."""
    a = simulated(tmp_path / "a.csv", long_rows)
    for scale, status in ((1 + 1e-10, 0), (1 + 1e-8, 1)):
        near = [replace(row, throughput_samples_per_s=row.throughput_samples_per_s * scale) for row in long_rows]
        assert call(a, simulated(tmp_path / "b.csv", near), "--check") == status
        assert "equal within 1e-09 of the value" in words(capsys)


def test_every_value_of_a_simulation_is_compared(tmp_path, long_rows, capsys):
    other = [replace(row, peak_reserved_gib=1.0, bubble_fraction=0.0) for row in long_rows]
    a, b = simulated(tmp_path / "a.csv", long_rows), simulated(tmp_path / "b.csv", other)
    assert call(a, b, "--check") == 1
    text = capsys.readouterr().out
    assert "throughput_samples_per_s, 3 cells: 3 equal." in text
    assert "bubble_fraction, 3 cells: 3 differs." in text
    assert "peak_reserved_gib, 3 cells: 3 value missing." in text


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
