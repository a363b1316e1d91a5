"""Constants are found again from the times that they give, whatever the device is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from gpipe_bench.kernels.kernel import Kernel, Part, Whole
from gpipe_bench.machine.constants import CONSTANTS, Constant, constant_problems
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.measure.cases import CASES, Bench, peak_cases
from gpipe_bench.simulator.constants_fit import TimedProgram, fitted_constants, traced, with_constants

H100 = load_profile("h100")
NAMES = list(dict.fromkeys(name for case in CASES for name in case.constants))
META = Bench(torch.device("meta"))


@pytest.fixture(scope="module")
def programs():
    return [TimedProgram(case.name, traced(partial(case.prepare, META)), (), case.tf32) for case in CASES]


def timed(programs, profile, factors=(1.0,)):
    return [replace(row, seconds=[factor * row.law_s(profile) for factor in factors]) for row in programs]


def test_the_cases_tell_all_constants_but_those_of_the_host_and_the_driver():
    assert set(CONSTANTS) - set(NAMES) == {"launch_us", "parameter_us", "lock", "multiprocessors"}


@pytest.mark.parametrize("factor", [1.0, 0.7, 0.1])
def test_constants_are_found_from_the_times_that_they_give(programs, factor):
    rates = [name for name in NAMES if CONSTANTS[name].unit in ("share", "G/s") and name != "memory"]
    truth = with_constants(H100, {name: factor * H100.constants[name] for name in rates})
    found = fitted_constants(timed(programs, truth), NAMES, H100)
    assert {name: found[name].value for name in NAMES} == pytest.approx(
        {name: truth.constants[name] for name in NAMES}, rel=0.02
    )


@pytest.mark.parametrize("share", [1.8, 3.9])
def test_convolutions_without_tf32_may_be_faster_than_the_peak_of_direct_ones(programs, share):
    truth = with_constants(H100, {"convolution_no_tf32": share})
    without = [row for row in programs if not row.tf32]
    found = fitted_constants(timed(without, truth), ["convolution_no_tf32"], H100)
    assert found["convolution_no_tf32"].value == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize(("name", "most"), [("convolution_no_tf32", 4), ("convolution_float32", 1)])
def test_a_share_has_a_largest_value(name, most):
    constants = H100.kernels | {name: Constant(value=1.01 * most, origin="assumed")}
    assert constant_problems(constants) == [
        f"kernels.{name} must be at most {most}, got {1.01 * most:g}; write a share, not percent"
    ]
    assert with_constants(H100, {name: 5}).constants[name] == most


def test_on_old_gpus_the_cases_of_halves_run_in_float16():
    old = replace(META, half=torch.float16)
    kernels = [kernel for case in CASES for kernel in traced(partial(case.prepare, old))]
    assert {kernel.dtype for kernel in kernels} == {"float32", "float16"}
    assert set(peak_cases(old)) == {"float32", "float64", "float16"}


def test_the_spread_is_that_of_the_repeats(programs):
    found = fitted_constants(timed(programs, H100, (1.1, 1.0, 0.9)), ["avg_pool"], H100)
    assert found["avg_pool"].origin == "measured"
    assert found["avg_pool"].spread == pytest.approx(0.1, rel=0.1)


def test_a_constant_that_bytes_hide_stays_assumed():
    hidden = Kernel("op", "float32", 1, Whole("memory_bound"), (Part("heavy", 10**9, 10**6),))
    program = TimedProgram("hidden", Counter([hidden]), [1.0])
    quick = TimedProgram("hidden", program.kernels, [program.law_s(H100) * 0.5])
    found = fitted_constants([quick], ["heavy"], H100)
    assert found["heavy"] == H100.kernels["heavy"]


def test_a_constant_that_bytes_hide_in_one_repeat_stays_assumed():
    part = Part("heavy", 10**9, 10**9)
    kernel = Kernel("op", "float32", 1, Whole("memory_bound"), (part,))
    bytes_alone = kernel._replace(parts=(part._replace(units=0),))
    slow = TimedProgram("slow", Counter([kernel]), ()).law_s(H100)
    fast = 0.8 * TimedProgram("fast", Counter([bytes_alone]), ()).law_s(H100)
    steady, torn = (TimedProgram("op", Counter([kernel]), [slow, slow, last]) for last in (slow, fast))
    assert fitted_constants([steady], ["heavy"], H100)["heavy"].origin == "measured"
    assert fitted_constants([torn], ["heavy"], H100)["heavy"] == H100.kernels["heavy"]
