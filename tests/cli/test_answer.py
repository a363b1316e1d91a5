"""What an ablation ends with: the answer, a word about each ratio that other load made worthless, and what to open."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from gpipe_bench.cli import main
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.results.schema import table_of
from gpipe_bench.results.tables import read_text
from tests.figures.synthetic import ablation_row, cpu_ways, write_rows

NOISY = "1 noisy ratio's interval is wider than 20%"


def is_of_rows(path):
    return table_of(list(read_text(path).columns), path).name == "rows"


def said(capsys, tmp_path, rows):
    path = write_rows(tmp_path / "results" / "ablation.csv", rows)
    with pytest.raises(SystemExit) as caught:
        main(["table", "--brief", "--rows", str(path)])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_the_answer_says_what_to_open(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    text = said(capsys, tmp_path, cpu_ways())
    assert "1.80\u00d7" in text
    assert "one thread per partition's operators" in " ".join(text.split())
    assert f"gpipe-bench report --results {tmp_path / 'results'}" in text
    assert "oisy" not in text


def test_rows_without_an_answer_say_what_is_missing(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    text = said(capsys, tmp_path, [ablation_row("dep-x-ptl", evidence="measured", throughput_samples_per_s=50.0)])
    assert text.startswith("No answer: these rows do not compare baseline, dep-x-x, dep-str-x, dep-str-ptl,\nnor")


def test_a_noisy_pair_is_called_so_and_the_others_stand(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    rows = [
        replace(row, throughput_samples_per_s=90.0) if (row.schedule, row.repeat) == ("1f1b", 2) else row
        for row in cpu_ways()
    ]
    text = said(capsys, tmp_path, rows)
    assert NOISY in text
    assert text.count("] noisy") == 1
    assert "The other ratios stand." in text


def test_the_answer_to_all_kinds_of_evidence_fits_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "results").mkdir()
    kinds = [
        ablation_row(variant, evidence=kind, flavour=flavour, throughput_samples_per_s=50.0, peak_reserved_gib=20.0)
        for kind, flavour in (("simulated", "published"), ("simulated", "current"), ("emulated", "current"))
        for variant in ("baseline", "dep-x-x", "dep-str-x", "dep-str-ptl")
    ]
    lines = said(capsys, tmp_path, [*kinds, *cpu_ways()]).split("Everything:")[0].splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    (line,) = [line for line in lines if line.startswith("dep-str-ptl")]
    assert len(line.split("\u00d7")) == 4


def test_what_to_open_fits_a_terminal_and_can_be_pasted(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    place = tmp_path / "results/reference/measured/a machine of two words"
    place.mkdir(parents=True)
    figure = place.parent / "figures/ablation_measured.png"
    figure.parent.mkdir()
    figure.touch()
    monkeypatch.chdir(tmp_path)
    path = write_rows(place / "ablation.csv", cpu_ways())
    with pytest.raises(SystemExit):
        main(["table", "--brief", "--rows", str(path)])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    figures, _, commands = text[text.index("Look at:") :].partition("Everything: ")
    assert figures.split()[-1] == str(figure.relative_to(tmp_path))
    everything, _, page = commands.partition("One page:")
    folder = str(place.relative_to(tmp_path))
    # The shell joins a line that ends with a backslash to the next one.
    joined = [shlex.split(command.replace("\\\n", "")) for command in (everything, page)]
    assert joined == [
        ["gpipe-bench", "table", "--rows", f"{folder}/ablation.csv"],
        ["gpipe-bench", "report", "--results", folder, "--out", "report.html"],
    ]


MEASURED = sorted(path for path in REFERENCE_FOLDER.glob("measured/*/*.csv") if is_of_rows(path))


@pytest.mark.parametrize("rows", MEASURED, ids=lambda path: path.relative_to(REFERENCE_FOLDER).as_posix())
@pytest.mark.parametrize("brief", [[], ["--brief"]], ids=["whole", "brief"])
def test_every_measured_table_of_rows_is_printed(capsys, rows, brief):
    with pytest.raises(SystemExit) as caught:
        main(["table", *brief, "--rows", str(rows)])
    assert (caught.value.code, capsys.readouterr().err) == (0, "")
    assert len(MEASURED) > 5


def test_a_sweep_has_no_answer_of_variants(capsys):
    with pytest.raises(SystemExit):
        main(["table", "--brief", "--rows", str(REFERENCE_FOLDER / "simulated/p40/sweep_unet.csv")])
    assert capsys.readouterr().out.startswith("No answer: ")
