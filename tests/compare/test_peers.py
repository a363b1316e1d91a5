"""Rows of the race of peers are compared contender by contender."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpipe_bench.cli import main
from gpipe_bench.results.rows import PeerRow
from gpipe_bench.results.tables import csv_text
from gpipe_bench.suite.evaluation.compare import compare_rows, usual_metrics

TINY = PeerRow(
    evidence="measured", workload="cells", model="tiny", model_args="L=2;width=4", partitions=2, chunks=8,
    checkpoint="always", variant="dep-str-ptl", batch_size=16, balance="1-1", seed=0,
)  # fmt: skip
NET = replace(TINY, workload="unet", model="unet", model_args="depth=2", host_time_per_cell_us=None)
NAMES = ("engine-autograd", "torchgpipe", "fairscale")


def race(scale=1.0):
    """Each contender with times of its own, on tiny layers and on a network."""
    tiny = [replace(TINY, contender=name, host_time_per_cell_us=scale * 100 * k) for k, name in enumerate(NAMES, 1)]
    nets = [replace(NET, contender=name, throughput_samples_per_s=10 * k / scale) for k, name in enumerate(NAMES, 1)]
    return [*tiny, *nets]


def table(path, rows):
    path.write_text(csv_text(PeerRow.columns(), [row.to_dict() for row in rows]))
    return path


def call(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(["compare", *map(str, arguments)])
    return caught.value.code


def test_two_contenders_never_share_a_cell():
    cells = compare_rows(race(), race(), "host_time_per_cell_us")
    assert [(cell.row.workload, cell.row.contender) for cell in cells] == [
        (workload, name) for workload in ("cells", "unet") for name in NAMES
    ]
    assert [cell.values for cell in cells[:3]] == [(100.0,), (200.0,), (300.0,)]


@pytest.mark.parametrize("key", ["workload", "contender", "variant", "checkpoint", "chunks"])
def test_what_tells_rows_apart_tells_cells_apart(key):
    other = replace(TINY, **{key: 4 if key == "chunks" else "other"})
    assert len(compare_rows([TINY, other], [])) == 2


def test_tiny_layers_are_compared_by_host_time():
    assert usual_metrics(TINY) == usual_metrics(replace(TINY, workload="combinations")) == ("host_time_per_cell_us",)
    assert usual_metrics(NET) == ("throughput_samples_per_s",)


def test_a_race_is_equal_to_itself(tmp_path, capsys):
    path = table(tmp_path / "peers.csv", race())
    assert call(path, path, "--all", "--check") == 0
    text = capsys.readouterr().out
    assert [text.count(f" {name} ") + text.count(f"\n{name} ") for name in NAMES] == [2, 2, 2]
    assert "host_time_per_cell_us, 3 cells: 3 equal." in text
    assert "throughput_samples_per_s, 3 cells: 3 equal." in text


def test_a_contender_that_is_gone_is_named(tmp_path, capsys):
    whole, part = table(tmp_path / "a.csv", race()), table(tmp_path / "b.csv", race()[1:])
    assert call(whole, part, "--check") == 1
    text = capsys.readouterr().out
    assert "in A alone" in text
    assert "engine-autograd" in text
    assert "torchgpipe" not in text


def test_a_folder_may_hold_a_race_beside_other_rows(tmp_path, capsys):
    from gpipe_bench.suite.evaluation.collect import write_tables
    from tests.suite.cells_of import ok_result

    table(tmp_path / "peers.csv", race())
    write_tables([ok_result("baseline")], "ablation", tmp_path / "ablation.csv")
    assert call(tmp_path, tmp_path, "--check") == 0
    assert "throughput_samples_per_s, 4 cells: 4 equal." in capsys.readouterr().out
