"""Devices that compute nothing allocate, launch and give what devices that compute do, and cost what is simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import groupby

import pytest
import torch

from gpipe_bench.emulator.library import devices
from gpipe_bench.emulator.recording import recording
from gpipe_bench.emulator.shapes import price_by
from gpipe_bench.kernels.cost import duration_ns
from gpipe_bench.kernels.kernel import Kernel
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.models.decoders import DECODERS
from gpipe_bench.models.table import MODELS
from gpipe_bench.simulator.tracing.model_trace import Tracer
from gpipe_bench.simulator.workloads.blocks import Blocks, Costs
from gpipe_bench.simulator.workloads.layer_passes import LayerPasses
from tests.emulator.bed.steps import SMALL, step

P40 = load_profile("p40")
# PyTorch writes attention and RMSNorm out for the CPU's kernels.
ATTENTION = {name for name in SMALL if name.startswith(("gpt2", "timm/vit"))} | {spec.name for spec in DECODERS}
# Autograd adds gradients in place, unless the modes of the simulator watch it; devices name the kernel that writes.
SAME = {
    "add_": "add",
    "new_zeros": "zero_",
    "full": "fill_",
    "scalar_tensor": "fill_",
    "scatter": "scatter_",
    "scatter_add": "scatter_add_",
    "_to_copy": "copy_",
}
# The simulator gives each layer a gradient laid out as its output.
LAID_OUT = {"vit", "captions"}


@cache
def computed():
    """The steps of devices that compute, which need a process of their own."""
    command = [sys.executable, "-m", "tests.emulator.bed.steps"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.fixture
def no_scratch():
    """Kernels without scratch memory, as the CPU's have none that is counted."""
    price_by(P40.model_copy(update={"winograd": False}))
    yield
    price_by(P40)


def one_backward(names):
    """The gradients of a convolution are kernels of their own here, and one there."""
    whole = ["convolution_backward" if name.startswith("convolution_backward") else name for name in names]
    return [name for name, _ in groupby(whole)]


@pytest.mark.usefixtures("no_scratch")
@pytest.mark.parametrize("name", SMALL)
def test_shapes_allocations_and_kernels_are_those_of_devices_that_compute(name):
    found, expected = step(name), computed()[name]
    assert found["given"] == expected["given"]
    if name not in ATTENTION:
        assert found["allocations"] == expected["allocations"]
        assert one_backward(found["kernels"]) == one_backward(expected["kernels"])


@pytest.mark.parametrize("name", [name for name in SMALL if name not in LAID_OUT])
def test_kernels_are_those_of_the_simulator(name):
    spec, device = MODELS[name], devices()[3]
    arguments = {**{key: argument.default for key, argument in spec.arguments.items()}, **SMALL[name]}
    model = spec.network(arguments)
    x, _ = spec.make_batch(2, arguments, torch.Generator().manual_seed(1))
    tracer = Tracer(model, x)
    trace = tracer.trace(2)
    layers = [trace.firsts[0], *trace.layers[1:]]
    # Between layers autograd adds up the gradients of a skip that several of them read.
    passes, blocks = LayerPasses(layers, tracer.facts(), input_bytes=[0], arriving={}, departing=()), Blocks(Costs(P40))
    passes.backward(blocks, passes.forward(blocks, graph=True)[2])
    kernels = [kernel for layer in layers for way in ("forward", "backward") for kernel in layer.kernels(way)]
    expected = Counter(
        (SAME.get(kernel.op, kernel.op), duration_ns(kernel, P40), kernel.launches)
        for kernel in (*kernels, *map(Kernel.sum, passes.added))
    )
    model.to(device)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    x = x.to(device)
    with recording() as found:
        output = model(x)
        outputs = output if isinstance(output, tuple) else (output,)
        torch.autograd.backward(outputs, [*map(torch.empty_like, outputs)])
    rows = [row for row in found.rows if row.kind == 0]
    names = [SAME.get(found.names[row.name], found.names[row.name]) for row in rows]
    assert (
        Counter(zip(names, (row.duration_ns for row in rows), (row.launches for row in rows), strict=True)) == expected
    )
