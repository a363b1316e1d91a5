"""The operators that the constants of a profile came from are there, and the law is near them."""

from __future__ import annotations

import pytest

from studies.kernels.__main__ import compared, rows


def test_operators_of_all_cells_are_there():
    assert {(row["model"], row["dtype"]) for row in rows()} == {
        (model, dtype) for model in ("unet", "amoebanet-d", "vit", "gpt2") for dtype in ("float32", "bfloat16")
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_law_is_near_what_was_measured_of_products(dtype):
    for name in ("mm", "addmm"):
        measured, simulated = compared()[name, dtype]
        assert simulated == pytest.approx(measured, rel=0.15)
