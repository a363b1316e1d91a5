"""An optimizer and the sums of gradients are launched as often as PyTorch launches them, and counted once for all."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_bench.simulator import simulate
from gpipe_bench.simulator.hardware.profile import load_profile
from gpipe_bench.simulator.tracing.operations import tensors_of
from gpipe_bench.simulator.workloads.build import build_workload
from gpipe_bench.simulator.workloads.optimizer_trace import make_optimizer
from gpipe_bench.util.choices import OPTIMIZERS

SHAPE = 4, 6
REAL = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, foreach=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, foreach=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
}


class Count(TorchDispatchMode):
    """Counts the operators that launch something, without numbers of steps, which stay on the host."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        large = any(tensor.numel() > 1 for tensor in tensors_of([*args]))
        self.seen += large and not func.is_view and not name.startswith(("empty", "detach", "_unsafe_view"))
        return func(*args, **(kwargs or {}))


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.LayerNorm(6))


def loss(output, target):
    return (output - target).square().sum()


def dispatched(optimizer, m, steps=2):
    """Operators of a plain training loop's last step."""
    model, batch = net(), torch.randn(SHAPE)
    update = REAL[optimizer](model.parameters())
    for _ in range(steps):
        update.zero_grad()
        with Count() as count:
            for part in batch.chunk(m):
                loss(model(part), part).backward()
            update.step()
    return count.seen


def simulated(optimizer, m, flavour="current", profile="h100"):
    """Launches of a step that a host bounds which takes a millisecond for each."""
    step = simulate(
        net(), balance=[4], batch_size=4, chunks=m, checkpoint="never", schedule="gpipe", optimizer=optimizer,
        sample=torch.empty(1, 6), loss=loss, target=torch.empty(SHAPE), profile=profile, launch_us=1000, flavour=flavour
    )  # fmt: skip
    assert step.host_fraction == pytest.approx(1, abs=0.02)
    return round(step.step_time_ms)


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_launches_what_pytorch_dispatches(optimizer, m):
    assert simulated(optimizer, m) == dispatched(optimizer, m)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_emulator_runs_these_optimizers(optimizer):
    model = net()
    made = make_optimizer(optimizer, model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    with Count() as count:
        made.step()
    workload = build_workload(
        model, balance=[4], batch_size=4, sample=torch.empty(1, 6), profile=load_profile("h100"), optimizer=optimizer
    )
    assert workload.optimizer[0].launches == count.seen


def test_the_published_runs_launched_for_each_parameter_and_added_to_zeros():
    parameters, m = 8, 2
    more = parameters + (2 * parameters - 1)
    assert simulated("sgd", m, "published", "p40") == simulated("sgd", m, profile="p40") + more
