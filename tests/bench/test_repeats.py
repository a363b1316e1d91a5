"""Repeats of a cell: each in a process of its own, each a result, none measured twice after an interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from gpipe_bench.bench.running.repeats import run_repeats
from gpipe_bench.bench.storage.kept import KeptParts
from gpipe_bench.bench.storage.raw import read_results
from gpipe_bench.errors import ConfigError
from gpipe_bench.util.processes import FORKS
from gpipe_bench.util.sealed import unseal
from tests.bench.cells_of import cell, in_file, ok_result

pytestmark = pytest.mark.skipif(not FORKS, reason="what measures must be a function of a module here")


def measured(made, repeat):
    """A result that says which process made it."""
    result = ok_result(made.variant, repeat)
    return replace(result, row=replace(result.row, reason=str(os.getpid())))


def refused(made, repeat):
    raise AssertionError


@pytest.fixture
def kept(tmp_path):
    return KeptParts.beside(tmp_path / "raw.json", "key")


def run(repeats, kept, measure, **settings):
    reported = []
    results = run_repeats(cell(**settings), repeats, kept, reported.append, measure)
    assert reported == results
    return results


def test_every_repeat_has_a_process_of_its_own(kept):
    results = run(3, kept, measured)
    assert [result.row.repeat for result in results] == [0, 1, 2]
    assert len({result.row.reason for result in results} | {str(os.getpid())}) == 4


def test_a_process_that_dies_is_a_row_and_the_others_go_on(kept):
    def measure(made, repeat):
        if repeat == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return measured(made, repeat)

    rows = [result.row for result in run(3, kept, measure)]
    assert [(row.repeat, row.status) for row in rows] == [(0, "ok"), (1, "error"), (2, "ok")]
    assert rows[1].reason == "process was killed by signal 9 (SIGKILL) before it had measured"
    assert rows[1].throughput_samples_per_s is None


def test_a_process_that_leaves_without_a_result_is_a_row(kept):
    (row,) = (result.row for result in run(1, kept, lambda made, repeat: os._exit(3)))
    assert (row.status, row.reason.split(" before")[0]) == ("error", "process ended with status 3")


def test_refused_arguments_are_no_result(kept):
    def measure(made, repeat):
        raise ConfigError(["balance must be 17 layers"])

    with pytest.raises(ConfigError, match="balance must be 17 layers"):
        run(2, kept, measure)


def test_an_unsupported_cell_needs_no_process(kept):
    rows = [result.row for result in run(2, kept, refused, variant="dep-str-ptl")]
    assert [(row.repeat, row.status) for row in rows] == [(0, "unsupported"), (1, "unsupported")]


def test_finished_repeats_are_not_measured_again(tmp_path, kept):
    run(3, kept, measured)
    again = KeptParts.beside(tmp_path / "raw.json", "key")
    results = run(2, again, refused)
    assert run(2, kept, refused) == results
    assert [result.row.status for result in run(3, again, refused)] == ["ok", "ok", "error"]


@pytest.mark.parametrize("settings", [{"seed": 1}, {"variant": "baseline"}])
def test_repeats_of_other_cells_are_not_taken(kept, settings):
    run(2, kept, measured)
    assert [result.row.status for result in run(1, kept, refused, **settings)] == ["error"]


@pytest.mark.timeout(120)
def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path):
    """As the workflow calls it: what was finished stays as it was, and nothing but the result is left."""
    out = tmp_path / "raw.json"
    options = [*in_file(tmp_path, cell()), "--repeats", "4", "--key", "k", "--out", str(out)]
    command = [sys.executable, "-m", "gpipe_bench", "run", *options]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    path = tmp_path / ".raw.json.kept"
    while not path.exists() and first.poll() is None:
        time.sleep(0.005)
    first.kill()
    first.wait()
    assert not out.exists()
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    finished = [json.loads(unseal(line.rstrip()))["part"] for line in whole[1:]]
    assert 1 <= len(finished) < 4
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    results = read_results(out)
    assert [result.row.repeat for result in results] == [0, 1, 2, 3]
    assert [result.steps for result in results[: len(finished)]] == [record["steps"] for record in finished]
    assert {result.row.status for result in results} == {"ok"}
    assert list(tmp_path.iterdir()) == [out]
