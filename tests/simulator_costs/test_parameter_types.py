"""An update costs what the types of the parameters make of it, and its state has those types, as PyTorch's has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench.machine.profile import load_profile
from gpipe_bench.settings import OPTIMIZERS
from gpipe_bench.simulator.workloads.build import build_workload
from gpipe_bench.simulator.workloads.optimizers import trace_optimizer
from gpipe_bench.simulator.workloads.workload import Workload

H100 = load_profile("h100")
WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8}
MAKERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


class Scaled(nn.Module):
    """A product in bfloat16 with a factor in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(1000))
        self.linear = nn.Linear(64, 64, dtype=torch.bfloat16)

    def forward(self, x):
        return self.linear(x) * self.factor.sum().bfloat16()


def work(cache, module, dtype, **options) -> Workload:
    return build_workload(
        nn.Sequential(module),
        balance=[1],
        batch_size=2,
        profile=H100,
        sample=torch.empty(1, 64, dtype=dtype),
        cache=cache,
        **options,
    )


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_is_what_pytorch_keeps(cache, optimizer, dtype):
    parameter = nn.Parameter(torch.ones(1000, dtype=getattr(torch, dtype)))
    parameter.grad = torch.ones_like(parameter)
    real = MAKERS[optimizer]([parameter])
    real.step()
    state = [item.nbytes // 1000 for item in real.state[parameter].values() if torch.is_tensor(item) and item.dim()]
    assert list(trace_optimizer(optimizer, [dtype], cache)[dtype].state_per_element) == state


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_moves_and_holds_bytes_in_proportion_to_the_type(cache, optimizer, dtype):
    traces = trace_optimizer(optimizer, ["float32", dtype], cache)
    own, single = traces[dtype], traces["float32"]
    moved = [
        sum(kernel.whole.bytes_read + kernel.whole.bytes_written for kernel in trace.kernels) for trace in (own, single)
    ]
    assert moved[0] * 4 == moved[1] * WIDTHS[dtype]
    assert own.temporary_per_element * 4 == single.temporary_per_element * WIDTHS[dtype]


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.5), ("float64", 2)])
def test_a_model_of_another_type_is_updated_in_that_type(cache, dtype, share):
    own, single = (
        work(cache, nn.Linear(64, 2**18, bias=False, device="meta", dtype=kind), kind, optimizer="adam")
        for kind in (getattr(torch, dtype), torch.float32)
    )
    assert own.static_bytes[0] == share * single.static_bytes[0]
    assert sum(own.static[0].temporary) == share * sum(single.static[0].temporary)
    floors = own.optimizer[0].launches * 1000 * H100.constants["start_us"]
    spent, other = (update.optimizer[0].duration_ns - floors for update in (own, single))
    assert spent == pytest.approx(share * other, rel=0.01)


def test_types_that_meet_in_one_layer_keep_their_own_widths(cache):
    (static,) = work(cache, Scaled(), torch.bfloat16, optimizer="momentum").static
    expected = [1000 * 4, 64 * 64 * 2, 64 * 2]
    assert list(static.resident) == list(static.state) == expected
    assert static.gradients == sum(expected)
