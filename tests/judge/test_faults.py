"""Planted faults are caught by the behaviours that must catch them, and by none of those that must not."""

from __future__ import annotations

import gc

import pytest

from gpipe_bench.judge.adapters.reference import Reference
from gpipe_bench.judge.behaviours import BEHAVIOURS
from gpipe_bench.judge.faults import FAULTS
from gpipe_bench.judge.runner import judge
from gpipe_bench.schedules import SCHEDULES

BAD = {"wrong", "raises", "hangs"}


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """Behaviours of memory collect garbage often: what PyTorch has loaded is left out."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", FAULTS)
def test_is_caught_by_what_must_catch_it_and_by_nothing_that_must_not(name):
    fault = FAULTS[name]
    engine = Reference(fault.schedule, fault.kind)
    caught = {each for each in (*fault.must, *fault.must_not) if judge(engine, each).kind in BAD}
    assert caught == {*fault.must}


def test_forty_faults_have_reports_of_their_own_and_are_told_apart():
    assert len({fault.report for fault in FAULTS.values()}) == len(FAULTS) >= 40
    assert all(fault.must and fault.must_not for fault in FAULTS.values())
    assert {name for fault in FAULTS.values() for name in (*fault.must, *fault.must_not)} <= {*BEHAVIOURS}


def reported(schedule, seed):
    engine = Reference(schedule)
    return {name: verdict for name in BEHAVIOURS if (verdict := judge(engine, name, seed)).kind in BAD}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_nothing_is_reported_of_the_right_reference(schedule):
    assert not reported(schedule, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_reported_of_the_right_reference_over_seeds(schedule, seed):
    assert not reported(schedule, seed)
