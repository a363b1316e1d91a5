"""Planted faults are caught by the behaviours that must catch them, and by none of those that must not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from gpipe_bench.judge.adapters.reference import Reference
from gpipe_bench.judge.behaviours import BEHAVIOURS
from gpipe_bench.judge.faults import FAULTS
from gpipe_bench.judge.planted import NEAR
from gpipe_bench.judge.runner import judge
from gpipe_bench.schedules import SCHEDULES

BAD = {"wrong", "raises", "hangs"}
RAISES = {
    "MustSend": "expecting to send gradients, got None",
    "Reentrant": "this checkpoint is incompatible with .grad()",
    "OnlyFloats": "only Tensors of floating point dtype can require gradients",
    "FrozenOutputs": "does not require grad and does not have a grad_fn",
    "OnlyTensors": "expected tensors between stages",
    "OtherType": "must have the same dtype",
    "EvaluationStays": "the backward pass was not initialised",
    "FailsForEver": "boom",
}
HANGS = {"OneOfMany", "Rendezvous", "OneHangs", "WarmUp", "Neighbours"}


@pytest.mark.parametrize("name", FAULTS)
def test_is_caught_by_what_must_catch_it_and_by_nothing_that_must_not(name):
    fault = FAULTS[name]
    engine = Reference(fault.schedule, fault.kind)
    verdicts = {each: judge(engine, each) for each in (*fault.must, *fault.must_not)}
    assert {each for each, verdict in verdicts.items() if verdict.kind in BAD} == {*fault.must}
    # By what the fault does, and not by an error of its own.
    kind = "raises" if name in RAISES else "hangs" if name in HANGS else "wrong"
    assert {verdicts[each].kind for each in fault.must} == {kind}
    assert all(RAISES.get(name, "") in verdicts[each].detail for each in fault.must)


def test_forty_faults_have_reports_of_their_own_and_are_told_apart():
    assert len({fault.report for fault in FAULTS.values()}) == len(FAULTS) >= 40
    assert all(fault.must and fault.must_not for fault in FAULTS.values())
    assert {name for fault in FAULTS.values() for name in (*fault.must, *fault.must_not)} <= {*BEHAVIOURS}


def test_how_much_of_each_report_was_read_stands_in_the_docs():
    read = Counter(fault.read for fault in FAULTS.values())
    near = [fault for fault in FAULTS.values() if fault.near]
    assert len(near) == len(NEAR)
    page = " ".join((Path(__file__).parents[2] / "docs/judge.md").read_text().split())
    assert f"The first post of {read['opening']} reports was read whole. " in page
    assert f"Of {read['excerpt']} reports an excerpt was read" in page
    assert f"Where {len(near)} of the {len(FAULTS)} differ" in page


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
