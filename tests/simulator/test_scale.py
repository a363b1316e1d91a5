"""What a simulation does grows with n m and no faster."""

from __future__ import annotations

import pytest

from gpipe_bench.components import Components
from gpipe_bench.simulator.clock.run import run
from gpipe_bench.simulator.clock.settings import Settings
from tests.simulator.support import Plain, task, workload


def entries(m, n, label):
    """How often the clock goes on to something else."""
    work = workload(m, [task()] * n, [(0, 1), (0, n - 1)])
    chosen = Settings(Components.from_label(label), "always")
    return run(work, Plain(), chosen).agenda_entries


@pytest.mark.parametrize("label", ["baseline", "dep-x-x", "dep-str-ptl"])
def test_each_microbatch_costs_the_same(label):
    counts = [entries(m, 4, label) for m in (10, 20, 30)]
    assert counts[2] - counts[1] == pytest.approx(counts[1] - counts[0], rel=0.02)


def test_each_partition_costs_the_same():
    counts = [entries(8, n, "dep-str-ptl") for n in (4, 8, 12)]
    assert counts[2] - counts[1] == pytest.approx(counts[1] - counts[0], rel=0.02)
