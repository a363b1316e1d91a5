"""The engine and other pipelines on virtual devices: which cases there are, and rows of a small one."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from gpipe_bench.bench.peers.emulated import EmulatedCase, emulated_cases, run_cases
from gpipe_bench.components import PUBLISHED
from gpipe_bench.emulator import build
from tests.processes import apart

OBSTACLE = build.obstacle()
SMALL = EmulatedCase("ablation", "gpipe_bench", "dep-str-ptl", "depth=2;B=1;C=4;size=16", (14, 15), 2, 4)

needs_compiler = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
needs_torchgpipe = pytest.mark.skipif(find_spec("torchgpipe") is None, reason="torchgpipe is not installed: make peers")


def rows_of(*cases):
    """Rows from a process of its own: after a backward pass, no process forked from here can have virtual devices."""
    return apart(run_cases, cases, len, {})


def test_the_published_variants_and_the_published_table_of_speed():
    found = [(case.experiment, case.contender, case.variant) for case in emulated_cases()]
    variants = [("ablation", package, variant) for package in ("gpipe_bench", "torchgpipe") for variant in PUBLISHED]
    assert found[:9] == [*variants, ("ablation", "fairscale", "dep-str-ptl")]
    assert {len(case.balance) for case in emulated_cases()[9:]} == {1, 2, 4, 8}


@needs_compiler
def test_rows_of_the_engine():
    rows = rows_of(SMALL)
    assert [(row.status, row.reason, row.evidence, row.repeat) for row in rows] == [
        ("ok", "", "emulated", repeat) for repeat in range(5)
    ]
    assert all(row.throughput_samples_per_s == pytest.approx(4e3 / row.step_time_ms) for row in rows)
    assert rows[0].peak_reserved_gib >= rows[0].peak_allocated_gib > 0


@needs_compiler
@needs_torchgpipe
def test_without_portals_skips_ride_through_every_device_of_torchgpipe():
    # The encoder's skips pass the middle partition, which then moves their bytes, too.
    case = replace(SMALL, contender="torchgpipe", balance=(5, 12, 12))
    portals, *_, carried = rows_of(*(replace(case, variant=variant) for variant in ("dep-str-ptl", "dep-str-x")))
    assert (portals.status, carried.status) == ("ok", "ok"), (portals.reason, carried.reason)
    assert carried.peak_allocated_gib > portals.peak_allocated_gib


@needs_compiler
def test_a_package_that_is_not_installed_is_skipped():
    (row,) = rows_of(replace(SMALL, contender="nobody"))
    assert (row.status, row.reason) == ("skipped", "nobody is not installed; run: make peers")
