"""`gpipe-bench emulate`: which steps a script has, and what a script that catches an error prints."""

from __future__ import annotations

import pytest

from gpipe_bench.emulator.build import obstacle
from tests.emulator.test_script import emulate

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

ADVERSARIES = """
import torch
kind = torch.accelerator.current_accelerator().type
layers = [torch.nn.Linear(64, 64, device=f"{kind}:0") for _ in range(2)]
optimizers = [torch.optim.SGD(layer.parameters()) for layer in layers]
for _ in range(4):
    for layer, optimizer in zip(layers, optimizers):
        layer(torch.ones(8, 64, device=f"{kind}:0")).sum().backward()
        optimizer.step()
"""

CAUGHT = """
import torch

class Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.empty(2**40, device=grad.device)

x = torch.ones(8, device=torch.accelerator.current_accelerator(), requires_grad=True)
try:
    Full.apply(x).sum().backward()
except torch.OutOfMemoryError:
    print("caught")
"""


def test_with_several_optimizers_a_step_ends_with_that_which_steps_first(tmp_path):
    (tmp_path / "train.py").write_text(ADVERSARIES)
    run = emulate(tmp_path / "train.py", "--devices", 1)
    assert run.returncode == 0, run.stderr
    assert "3 steps after the first" in run.stdout


def test_an_error_that_the_script_catches_is_not_shown_while_races_are_looked_for(tmp_path):
    (tmp_path / "train.py").write_text(CAUGHT)
    run = emulate(tmp_path / "train.py", "--devices", 1, "--races")
    assert run.returncode == 0, run.stderr
    assert "caught" in run.stdout
    assert not run.stderr
