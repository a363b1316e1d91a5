"""Progress goes to stderr: a live line on a terminal, and nothing but now and then a line elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from gpipe_bench.cli import progress as module
from gpipe_bench.cli.progress import progress
from tests.figures.synthetic import ablation_row, write_rows

PROGRAM = """
from gpipe_bench.cli.progress import progress
with progress("racing") as task:
    task.step(1, 4, "case x")
    task.line("a row")
print("end")
"""


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands at what a test sets it to."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_lines_come_now_and_then(clock, capsys):
    with progress("racing") as task:
        for done in range(5):
            clock[0] = 50.0 * done
            task.step(done, 5, "case x")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "racing case x: 2 of 5, 100 s used, about 150 s left".replace("100 s", "2 min").replace("150 s", "2 min"),
        "racing case x: 4 of 5, 3 min used, about 50 s left",
    ]


def test_short_work_says_nothing(clock, capsys):
    with progress("simulating") as task:
        task.step(1, 2)
        task.line("a row")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("a row\n", "")


def test_on_a_terminal_a_line_shows_progress_and_standard_output_has_results_alone():
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=False, text=True)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert (done.returncode, done.stdout) == (0, "a row\nend\n")
    assert "racing case x: 1 of 4, 0 s used, about 0 s left" in shown


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("report", "--results", "{folder}", "--out", "{folder}/page.html"), "making the page (timelines): 2 of 3"),
        (("compare", "{folder}", "{folder}"), "comparing"),
        (("datapackage", "check", "--folder", "{folder}"), "checking {folder}"),
    ],
)
def test_commands_that_read_many_tables_show_progress(tmp_path, arguments, shown):
    write_rows(tmp_path / "ablation.csv", [ablation_row("baseline", repeat=0)])
    ours, theirs = pty.openpty()
    words = [word.format(folder=tmp_path) for word in arguments]
    command = [sys.executable, "-m", "gpipe_bench", *words]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, check=False, env={**os.environ, "COLUMNS": "500"})
    os.close(theirs)
    assert shown.format(folder=tmp_path) in os.read(ours, 1 << 16).decode()
    os.close(ours)
