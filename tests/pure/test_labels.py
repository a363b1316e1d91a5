"""What rows say in words."""

from __future__ import annotations

import pytest

from gpipe_bench.results.labels import labelled
from gpipe_bench.results.rows import Row


def cell(chunks: int, batch_size: int, partitions: int = 4) -> Row:
    return Row(experiment="sweep_mine", evidence="simulated", partitions=partitions, chunks=chunks,
               batch_size=batch_size, checkpoint="always", flavour="current")  # fmt: skip


def test_a_row_of_a_sweep_says_what_stays_the_same():
    rows = [cell(1, 32), cell(2, 32), cell(4, 32), cell(1, 8), cell(2, 16)]
    kinds = ["fixed batch", "fixed batch", "both", "fixed micro-batch", "fixed micro-batch"]
    assert [row.sweep_kind for row in labelled(rows)] == kinds


def test_series_of_other_numbers_of_devices_are_apart():
    assert [row.sweep_kind for row in labelled([cell(1, 32), cell(2, 32, partitions=2)])] == ["", ""]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"partitions": 1, "chunks": 1, "checkpoint": "never"}, "plain loop"),
        ({"partitions": 1, "chunks": 4, "checkpoint": "never"}, "micro-batch loop"),
        ({"partitions": 1, "chunks": 4, "checkpoint": "always"}, "paper's executor"),
        ({"partitions": 2, "chunks": 4}, "paper's executor"),
        ({"partitions": 2, "backward": "scheduled", "schedule": "zb_v"}, "zb_v"),
        ({"partitions": 2, "source": "torchgpipe 0.0.7"}, ""),
        ({"evidence": "published", "partitions": 2}, ""),
    ],
)
def test_a_row_says_how_it_was_run(settings, words):
    (row,) = labelled([Row(**settings)])
    assert row.run_as == words


def test_a_simulated_row_says_whose_autograd_engine_it_has():
    rows = [Row(evidence="simulated", flavour=flavour) for flavour in ("published", "current")]
    assert [row.autograd for row in labelled(rows)] == ["PyTorch 1.3", "PyTorch 2"]
