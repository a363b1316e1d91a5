"""What a simulation does grows with n m and no faster."""

from __future__ import annotations

from itertools import product

import pytest

from gpipe_bench.components import Components
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.simulator.steps.run import run
from gpipe_bench.simulator.steps.settings import Settings
from tests.cover import cover
from tests.simulator.support import Plain, task, workload

VARIANTS = {
    **{label: Components.from_label(label) for label in ("baseline", "dep-x-x", "dep-str-ptl")},
    "no clock-cycle": Components(clock_cycle=False),
    "off": Components(*[False] * 5),
}
WAYS = {name: {"schedule": name} for name in SCHEDULES}
for name, components in VARIANTS.items():
    for checkpoint in ("always", "never"):
        WAYS[f"{name} {checkpoint}"] = {"components": components, "checkpoint": checkpoint}
    WAYS[f"{name} published"] = {"components": components, "flavour": "published"}
QUEUES = {"no queue": Plain(), "queue": Plain(launch_ns=10_000, queue_depth=64)}


def effort(m, n, machine=QUEUES["no queue"], **chosen):
    """How much the clock does."""
    return run(workload(m, [task(launches=5)] * n, [(0, 1), (0, n - 1)]), machine, Settings(**chosen)).effort


@pytest.mark.parametrize("label", ["baseline", "dep-x-x", "dep-str-ptl"])
def test_each_microbatch_costs_the_same(label):
    counts = [effort(m, 4, components=VARIANTS[label], checkpoint="always") for m in (10, 20, 30)]
    assert counts[2] - counts[1] == pytest.approx(counts[1] - counts[0], rel=0.02)


def test_each_partition_costs_the_same():
    counts = [effort(8, n, checkpoint="always") for n in (4, 8, 12)]
    assert counts[2] - counts[1] == pytest.approx(counts[1] - counts[0], rel=0.02)


@pytest.mark.parametrize(("way", "transfer", "queue"), cover(product(WAYS, ("direct", "host"), QUEUES)))
def test_each_task_costs_the_same(way, transfer, queue):
    """Nearly: the more partitions, the less of a step is its beginning and end."""
    some, more = (effort(4 * n, n, QUEUES[queue], transfer=transfer, **WAYS[way]) / (4 * n * n) for n in (6, 16))
    assert more < 1.2 * some
