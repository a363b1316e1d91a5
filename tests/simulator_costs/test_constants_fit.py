"""Constants are found again from the times that they give, whatever the device is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from gpipe_bench.measure.cases import CASES, Bench
from gpipe_bench.simulator.constants_fit import TimedProgram, fitted_constants, traced, with_constants
from gpipe_bench.simulator.hardware.constants import CONSTANTS
from gpipe_bench.simulator.hardware.profile import load_profile
from gpipe_bench.simulator.tracing.steps import Kernel, Part

H100 = load_profile("h100")
NAMES = list(dict.fromkeys(name for case in CASES for name in case.constants))
META = Bench(torch.device("meta"))


@pytest.fixture(scope="module")
def programs():
    return [TimedProgram(case.name, traced(partial(case.prepare, META)), (), case.tf32) for case in CASES]


def timed(programs, profile, factors=(1.0,)):
    return [replace(row, seconds=[factor * row.law_s(profile) for factor in factors]) for row in programs]


def test_the_cases_tell_all_constants_but_those_of_the_host_and_the_driver():
    assert set(CONSTANTS) - set(NAMES) == {"launch_us", "lock", "multiprocessors"}


@pytest.mark.parametrize("factor", [1.0, 0.7, 0.1])
def test_constants_are_found_from_the_times_that_they_give(programs, factor):
    rates = [name for name in NAMES if CONSTANTS[name].unit in ("share", "G/s") and name != "memory"]
    truth = with_constants(H100, {name: factor * H100.constants[name] for name in rates})
    found = fitted_constants(timed(programs, truth), NAMES, H100)
    assert {name: found[name].value for name in NAMES} == pytest.approx(
        {name: truth.constants[name] for name in NAMES}, rel=0.02
    )


def test_the_spread_is_that_of_the_repeats(programs):
    found = fitted_constants(timed(programs, H100, (1.1, 1.0, 0.9)), ["avg_pool"], H100)
    assert found["avg_pool"].origin == "measured"
    assert found["avg_pool"].spread == pytest.approx(0.1, rel=0.1)


def test_a_constant_that_bytes_hide_stays_assumed():
    hidden = Kernel("op", "memory_bound", "elementwise", "float32", 1, 0, 0, 0, 0, (Part("heavy", 10**9, 10**6),))
    program = TimedProgram("hidden", Counter([hidden]), [1.0])
    quick = TimedProgram("hidden", program.kernels, [program.law_s(H100) * 0.5])
    found = fitted_constants([quick], ["heavy"], H100)
    assert found["heavy"] == H100.kernels["heavy"]
