"""Planted faults are caught by the behaviours that must catch them, and by none of those that must not."""

from __future__ import annotations

import pytest

from gpipe_bench.judge.adapters.reference import Reference
from gpipe_bench.judge.faults import FAULTS
from gpipe_bench.judge.runner import judge


@pytest.mark.parametrize("name", FAULTS)
def test_is_caught_by_what_must_catch_it_and_by_nothing_that_must_not(name):
    fault = FAULTS[name]
    engine = Reference(fault.schedule, fault.kind)
    names = (*fault.must, *fault.must_not)
    caught = {each for each in names if judge(engine, each).kind not in ("ok", "limit")}
    assert caught == {*fault.must}
