"""What an ablation ends with: the answer, a word where a busy machine made it worthless, and what to open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpipe_bench.cli import main
from tests.figures.synthetic import cpu_ways, write_rows

BUSY = "The machine was busy: intervals of 1f1b are wider than 20%"


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
    assert f"gpipe-bench report --results {tmp_path / 'results'}" in text
    assert "busy" not in text


def test_values_of_a_busy_machine_are_called_so(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    rows = [
        replace(row, throughput_samples_per_s=90.0) if (row.schedule, row.repeat) == ("1f1b", 2) else row
        for row in cpu_ways()
    ]
    assert BUSY in said(capsys, tmp_path, rows)
