"""What a loss holds: its own result, and the gradients on the way to that of the output."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench.machine.profile import load_profile
from gpipe_bench.simulator import simulate

H200 = load_profile("h200").model_copy(update={"cublas_workspace_mib": 0})
PLAIN = H200.model_copy(update={"kernels": None})
ROWS, CLASSES = 2048, 20000
LOGITS = ROWS * CLASSES * 4 / 2**30


def peak(profile, loss=functional.cross_entropy, **options):
    with torch.device("meta"):
        layers, sample = nn.Sequential(nn.Linear(8, CLASSES)), torch.empty(1, 8)
        classes = torch.empty(ROWS, dtype=torch.int64)
        target = classes if loss is functional.cross_entropy else torch.empty(ROWS, CLASSES)
    given = {"balance": [1], "batch_size": ROWS, "sample": sample, "loss": loss, "target": target, **options}
    step = simulate(layers, profile=profile, checkpoint="never", optimizer=None, steps=1, **given)
    return step.peak_allocated_gib / LOGITS


@pytest.mark.parametrize(("loss", "copies"), [(functional.cross_entropy, 3), (functional.mse_loss, 3)])
def test_a_loss_holds_what_pytorch_holds(loss, copies):
    """Log-probabilities and two gradients; output, difference and gradient."""
    assert peak(H200, loss) == pytest.approx(copies, rel=0.02)


def test_without_constants_of_kernels_it_holds_output_and_gradient():
    assert peak(PLAIN) == pytest.approx(2, rel=0.02)


def test_the_loss_of_a_micro_batch_holds_its_share():
    assert peak(H200, chunks=4, schedule="1f1b") == pytest.approx(3 / 4, rel=0.05)


def test_outputs_are_put_together_before_the_loss():
    assert peak(H200, chunks=4) == pytest.approx(3, rel=0.02)
