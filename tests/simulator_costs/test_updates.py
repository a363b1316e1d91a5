"""An optimizer and the sums of gradients are launched as often as PyTorch launches them, and counted once for all."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_bench.kernels.operations import tensors_of
from gpipe_bench.kernels.optimizers import make_optimizer
from gpipe_bench.machine.constants import Constant
from gpipe_bench.machine.profile import Profile, load_profile
from gpipe_bench.settings import OPTIMIZERS
from gpipe_bench.simulator import simulate
from gpipe_bench.simulator.workloads.build import build_workload

SHAPE, PARAMETERS = (4, 6), 8
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


def simulated(optimizer, m, flavour="current", profile=None):
    """Operations of a step that a host bounds: a millisecond for each, and none for parameters in an update."""
    step = simulate(
        net(), balance=[4], batch_size=4, chunks=m, checkpoint="never", schedule="gpipe", optimizer=optimizer,
        sample=torch.empty(1, 6), loss=loss, target=torch.empty(SHAPE), profile=profile or of_host(launch_us=28),
        launch_us=1000, flavour=flavour
    )  # fmt: skip
    assert step.host_fraction == pytest.approx(1, abs=0.02)
    return round(step.step_time_ms)


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_launches_what_pytorch_dispatches(optimizer, m):
    """And autograd goes to each parameter to keep its first gradient, which launches nothing."""
    assert simulated(optimizer, m) == dispatched(optimizer, m) + PARAMETERS


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
    """Autograd goes to each of them in today's runs, too."""
    zeroed, updated = PARAMETERS, PARAMETERS - 1
    assert simulated("sgd", 2, "published", "p40") == simulated("sgd", 2, profile="p40") + zeroed + updated


def of_host(**constants):
    """An H100 with such a host."""
    own = {name: Constant(value=us, origin="measured") for name, us in constants.items() if us}
    known = load_profile("h100")
    others = {name: one for name, one in known.kernels.items() if name != "parameter_us"}
    return Profile(**{**known.settings, "kernels": {**others, **own}})


@pytest.mark.parametrize(("launch_us", "balance"), [(0.001, [4]), (1000, [4]), (1000, [1, 3])])
@pytest.mark.parametrize("optimizer", [None, "sgd", "adam"])
def test_an_update_keeps_host_and_device_for_each_parameter(launch_us, balance, optimizer):
    """Whether the device bounds the step, or the host."""
    without, some = (
        simulate(
            net(), balance=balance, batch_size=4, checkpoint="never", optimizer=optimizer, sample=torch.empty(1, 6),
            profile=of_host(launch_us=launch_us, parameter_us=us)
        ).step_time_ms
        for us in (0, 100)
    )  # fmt: skip
    assert some - without == pytest.approx(0.1 * PARAMETERS * (optimizer is not None), rel=0.01, abs=1e-6)


def test_another_host_changes_its_time_for_a_parameter_as_much():
    slower = of_host(launch_us=10, parameter_us=6).adapted(launch_us=20)
    assert (slower.constants["launch_us"], slower.constants["parameter_us"]) == (20, 12)
    assert "parameter_us" not in of_host(launch_us=10).adapted(launch_us=20).constants
    assert load_profile("p40").adapted(launch_us=20).constants == {}
