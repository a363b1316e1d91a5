"""Emulated cells are held to what the simulator says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import read_table
from gpipe_bench.suite.evaluation.verify import checks_of_emulations, judge, read_tolerances
from tests.suite.test_verify import ROW, table

TWIN = replace(ROW, flavour="current", step_time_ms=100.0, peak_allocated_gib=2.0, peak_reserved_gib=4.0)
EMULATED = replace(TWIN, evidence="emulated", flavour="")
ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "results/reference"
NAMES = "ablation", "speed", "memory", "schedules", "sweep_unet", "sweep_amoebanet-d", "sweep_vit", "ablation_shared"
EMULATIONS = [path for name in NAMES for path in sorted(REFERENCE.glob(f"emulated/*/{name}.csv"))]


def test_an_emulated_cell_is_held_to_the_simulator():
    rows = table(replace(TWIN, flavour="published", step_time_ms=7.0), TWIN, replace(EMULATED, step_time_ms=102.0))
    found = {check.metric: check for check in checks_of_emulations("ablation", rows)}
    assert {name: (one.expected, one.got) for name, one in found.items()} == {
        "step_time_ms": (100.0, 102.0),
        "peak_allocated_gib": (2.0, 2.0),
        "peak_reserved_gib": (4.0, 4.0),
    }
    assert {one.against for one in found.values()} == {"simulated"}


@pytest.mark.parametrize(("times", "got"), [((90.0, 110.0), 100.0), ((101.0, 103.0), 101.0), ((80.0, 99.0), 99.0)])
def test_where_threads_race_the_nearest_value_of_the_range_counts(times, got):
    steps = [replace(EMULATED, repeat=repeat, step_time_ms=time) for repeat, time in enumerate(times)]
    (check,) = (one for one in checks_of_emulations("a", table(TWIN, *steps)) if one.metric == "step_time_ms")
    assert check.got == got


def test_an_emulated_cell_that_was_skipped_or_has_no_twin_is_held_to_nothing():
    skipped = replace(EMULATED, status="skipped", reason="no compiler")
    assert not list(checks_of_emulations("a", table(TWIN, skipped)))
    assert not list(checks_of_emulations("a", table(replace(TWIN, chunks=64), EMULATED)))


@pytest.mark.parametrize("path", EMULATIONS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_committed_emulations_are_within_their_tolerances(path):
    twin = REFERENCE / "simulated" / path.parent.name / path.name
    rows = pd.concat([read_table(one, ["evidence"], Row) for one in (path, twin)])
    judged = judge(checks_of_emulations(path.stem, rows), read_tolerances(ROOT / "config/tolerances.csv"))
    assert len(judged) >= 3
    assert not [check.line() for check in judged if check.verdict == "OUTSIDE"]
