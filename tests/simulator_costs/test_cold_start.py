"""What makes tracing short leaves the traces as they are."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

from gpipe_bench.collection import retire_collection
from gpipe_bench.simulator.tracing.model_trace import Tracer
from gpipe_bench.simulator.tracing.recorder import Recorder
from gpipe_bench.simulator.tracing.steps import Kernel
from gpipe_bench.simulator.workloads.optimizer_trace import trace_step

MAKERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, foreach=False),
    "adam": lambda parameters: torch.optim.Adam(parameters, foreach=False),
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_without_its_wrappers_does_the_same(name):
    found = trace_step(name, "float64")
    parameter = nn.Parameter(torch.empty(1000, dtype=torch.float64, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    optimizer = MAKERS[name]([parameter])
    optimizer.step()
    with Recorder() as recorder:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    kernels = [step for step in recorder.take() if isinstance(step, Kernel) and step.bytes_written >= parameter.nbytes]
    assert found.kernels == tuple(kernels)
    assert len(found.state_per_element) == sum(
        isinstance(value, torch.Tensor) and value.shape == parameter.shape
        for value in optimizer.state[parameter].values()
    )


def test_an_optimizer_is_traced_without_the_compiler():
    code = (
        "import sys; from gpipe_bench.simulator.workloads.optimizer_trace import trace_step; "
        f"[trace_step(name, 'float32') for name in {sorted(MAKERS)}]; print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_kernels_are_known_by_which_operands_are_one():
    x, y = (torch.empty(4, 3, device="meta") for _ in range(2))
    with Recorder() as recorder:
        for other in (y, x, y):
            torch.mul(x, other)
    read = [step.bytes_read for step in recorder.take() if isinstance(step, Kernel)]
    assert read == [2 * x.nbytes, x.nbytes, 2 * x.nbytes]


def test_a_model_of_ones_own_needs_no_copies():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
        sample = torch.empty(2, 3, 4, 4)
    traces = [Tracer(model, sample, owned=owned) for owned in (False, True)]
    facts = [tracer.facts() for tracer in traces]
    # Each on its own: equal layers of two tracers would be traced once.
    found = []
    for tracer in traces:
        tracer._runs.clear()
        tracer._kinds = [(object(), False) for _ in tracer._kinds]
        found.append(tracer.trace(6))
    assert found[0] == found[1]
    assert facts[0] == facts[1] == traces[1].facts()


def test_a_process_that_ends_searches_nothing():
    before = gc.get_freeze_count()
    try:
        retire_collection()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
