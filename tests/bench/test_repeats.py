"""Repeats of a cell: each in a process of its own, each a result."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from gpipe_bench.bench.running.repeats import run_repeats
from gpipe_bench.errors import ConfigError
from gpipe_bench.util.processes import FORKS
from tests.bench.cells_of import cell, ok_result

pytestmark = pytest.mark.skipif(not FORKS, reason="what measures must be a function of a module here")


def measured(made, repeat):
    """A result that says which process made it."""
    result = ok_result(made.variant, repeat)
    return replace(result, row=replace(result.row, reason=str(os.getpid())))


def refused(made, repeat):
    raise AssertionError


def run(repeats, measure, **settings):
    reported = []
    results = run_repeats(cell(**settings), repeats, reported.append, measure)
    assert reported == results
    return results


def test_every_repeat_has_a_process_of_its_own():
    results = run(3, measured)
    assert [result.row.repeat for result in results] == [0, 1, 2]
    assert len({result.row.reason for result in results} | {str(os.getpid())}) == 4


def test_a_process_that_dies_is_a_row_and_the_others_go_on():
    def measure(made, repeat):
        if repeat == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return measured(made, repeat)

    rows = [result.row for result in run(3, measure)]
    assert [(row.repeat, row.status) for row in rows] == [(0, "ok"), (1, "error"), (2, "ok")]
    assert rows[1].reason == "process was killed by signal 9 (SIGKILL) before it had measured"
    assert rows[1].throughput_samples_per_s is None


def test_a_process_that_leaves_without_a_result_is_a_row():
    (row,) = (result.row for result in run(1, lambda made, repeat: os._exit(3)))
    assert (row.status, row.reason.split(" before")[0]) == ("error", "process ended with status 3")


def test_refused_arguments_are_no_result():
    def measure(made, repeat):
        raise ConfigError(["balance must be 17 layers"])

    with pytest.raises(ConfigError, match="balance must be 17 layers"):
        run(2, measure)


def test_an_unsupported_cell_needs_no_process():
    rows = [result.row for result in run(2, refused, variant="dep-str-ptl")]
    assert [(row.repeat, row.status) for row in rows] == [(0, "unsupported"), (1, "unsupported")]
