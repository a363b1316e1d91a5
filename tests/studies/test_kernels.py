"""The operators that the constants of a profile came from are there, and the law is near them."""

from __future__ import annotations

import pytest

from gpipe_bench.machine.profile import load_profile
from gpipe_bench.simulator.published.settings import settings_of
from gpipe_bench.suite.published.measured import TABLES, measured_steps
from studies.kernels.__main__ import compared, rows
from studies.kernels.attention import SHARES, fitted_share
from studies.kernels.host import fitted


def test_operators_of_all_cells_are_there():
    assert {(row["model"], row["dtype"]) for row in rows()} == {
        (model, dtype) for model in ("unet", "amoebanet-d", "vit", "gpt2") for dtype in ("float32", "bfloat16")
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_law_is_near_what_was_measured_of_products(dtype):
    for name in ("mm", "addmm"):
        measured, simulated = compared()[name, dtype]
        assert simulated == pytest.approx(measured, rel=0.15)


def test_the_share_of_attention_without_dropout_is_that_of_the_profile():
    seen = [row for row in settings_of("llm-foundry") if row.experiment in ("1b-4096", "1b-16384")]
    constants = load_profile("a100").kernels
    assert {(constants[name].value, constants[name].origin) for name in SHARES} == {(0.3, "fitted")}
    assert fitted_share(seen) == pytest.approx(0.3, rel=0.02)


def test_constants_that_training_steps_gave_are_called_fitted():
    constants = load_profile("h200").kernels
    fitted_ones = {name for name, constant in constants.items() if constant.origin == "fitted"}
    assert fitted_ones == {"launch_us", "parameter_us"}


@pytest.mark.slow
def test_the_host_of_the_profile_is_the_one_that_fits_the_steps(tmp_path):
    constants = load_profile("h200").constants
    found = fitted(list(measured_steps(TABLES["h200-steps"], tmp_path)))
    assert found == pytest.approx((constants["launch_us"], constants["parameter_us"]), abs=0.05)
