"""Operations under the recorder give what PyTorch gives, and raise what it raises."""

from __future__ import annotations

import pytest
import torch

from gpipe_bench.kernels.meta_results import evaluate
from gpipe_bench.simulator.tracing.recorder import Recorder

aten = torch.ops.aten


@pytest.mark.parametrize("other", [1, torch.tensor(1.0)])
def test_values_that_are_there_are_changed(other):
    """Optimizers count their steps on the CPU."""
    x = torch.zeros(())
    with Recorder():
        x.add_(other)
    assert x.item() == 1


def test_what_is_written_counts_as_written():
    x = torch.empty(2, device="meta")
    with Recorder():
        x.add_(x)
        x.mul_(2)
    assert x._version == 2


def test_an_error_is_that_of_the_operation():
    x = torch.empty(2, 3, device="meta")
    with pytest.raises(RuntimeError, match="dim"):
        evaluate(aten.mm.default, (x, x), {})
    fits = x, x.t()
    assert evaluate(aten.mm.default, fits, {}).shape == (2, 2)


def test_integers_give_numbers_of_the_type_that_is_the_default_now(default_dtype):
    x = torch.ones(3, dtype=torch.int64, device="meta")
    for dtype in (torch.float32, torch.float64, torch.float32):
        default_dtype(dtype)
        assert evaluate(aten.div.Tensor, (x, x), {}).dtype is dtype


@pytest.fixture
def default_dtype():
    """Sets the default type of floats until the test has ended."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)
