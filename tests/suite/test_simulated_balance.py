"""A balance that is left to the simulator: the slowest partition is no slower than with any other split."""

from __future__ import annotations

from gpipe_bench.balance import layer_simulated_times
from gpipe_bench.models.table import parse_arguments
from gpipe_bench.simulator import Model
from gpipe_bench.suite.running.simulated import simulate_cells, simulated_balance
from gpipe_bench.suite.simulated_cells import SimulatedCell

CELL = SimulatedCell(
    model_args="depth=1;B=1;C=8;size=16", partitions=3, balance="auto", batch_size=8, chunks=2, flavour="current"
)


def slowest(balance):
    model = Model(CELL.model, parse_arguments(CELL.model, CELL.model_args))
    times = layer_simulated_times(model, profile=CELL.profile, batch_size=CELL.batch_size, chunks=CELL.chunks)
    ends = [sum(balance[: j + 1]) for j in range(len(balance))]
    return max(sum(times[end - size : end]) for size, end in zip(balance, ends, strict=True))


def test_no_split_has_a_faster_slowest_partition():
    found = simulated_balance(CELL)
    assert sum(found) == 17
    splits = [(a, b, 17 - a - b) for a in range(1, 16) for b in range(1, 17 - a)]
    assert slowest(found) == min(slowest(split) for split in splits)


def test_the_row_says_what_the_balance_was():
    (result,) = simulate_cells([CELL], timelines=())
    assert result.row.balance == "-".join(map(str, simulated_balance(CELL)))
    assert [record["layers"] for record in result.devices] == simulated_balance(CELL)
    assert result.events == []
    assert result.cell.endswith(result.row.config_sha256[:8])
