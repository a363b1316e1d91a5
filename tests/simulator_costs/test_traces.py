"""Traces of layers and models: what lives how long, what scales, what is shared, what is kept on disk."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench.kernels.kernel import Alloc, Kernel
from gpipe_bench.models.resnet import resnet101
from gpipe_bench.simulator.tracing.model_trace import Tracer, signature
from gpipe_bench.simulator.tracing.scaling import PROBES, fit_line
from gpipe_bench.simulator.workloads.sources import ModelSource, module_source
from tests.simulator_costs.layers import F32, allocs, flop, frees, suite_tracer, trace

N, C = 4, 8
ROW = N * C * F32


def test_a_graph_keeps_what_its_backward_pass_needs():
    middle = trace(nn.Sequential(nn.Linear(C, C), nn.ReLU(), nn.Linear(C, C)), N, C)
    first, relu, last = middle.layers
    assert first.kept == (0,), "a linear layer keeps its input for the gradient of the weight"
    assert relu.kept == (relu.outputs[0].block,), "ReLU keeps its result, not its input"
    assert last.kept == (0,)


def test_memory_of_a_chain_inside_a_layer():
    """relu(x) lives until the multiplication is done; with a graph until its backward pass."""

    class Twice(nn.Module):
        def forward(self, x):
            return torch.relu(x).exp() * 2.0

    traced = trace(nn.Sequential(nn.Linear(C, C), Twice()), N, C)
    layer = traced.layers[1]
    assert allocs(layer.plain) == [ROW, ROW, ROW]
    assert frees(layer.plain) == [1, 2]
    assert frees(layer.forward) == []
    assert layer.kept == (1, 2)
    assert {1, 2} <= set(frees(layer.backward))


def test_parameter_gradients_are_added_and_freed():
    layer = trace(nn.Sequential(nn.Linear(C, C, bias=False)), N, C).layers[0]
    gradient = next(step for step in layer.backward if isinstance(step, Alloc))
    add = [step for step in layer.backward if isinstance(step, Kernel)][-1]
    assert gradient.bytes == C * C * F32
    assert (add.op, add.whole.bytes_read, add.whole.bytes_written) == ("add_", 2 * gradient.bytes, gradient.bytes)
    assert gradient.block in frees(layer.backward)


def test_an_output_that_nobody_reads_gets_no_gradient():
    full = suite_tracer("amoebanet-d", L=3, D=32, size=64).trace(2)
    last_cell, earlier_cell = full.layers[-2], full.layers[-4]
    assert last_cell.output_gradients[1] == -1, "the classifier reads only the first of two states"
    assert min(earlier_cell.output_gradients) >= 0


def test_skips_have_numbers_and_gradients():
    tracer = suite_tracer("unet", depth=2, B=1, C=4, size=16)
    facts = tracer.facts()
    assert [layer.stashes for layer in facts if layer.stashes] == [(0,), (1,)]
    assert [layer.reads for layer in facts if layer.reads] == [(1,), (0,)]
    traced = tracer.trace(2)
    stash = next(found for found, layer in zip(traced.layers, facts, strict=True) if layer.stashes)
    assert [kernel.op for kernel in stash.kernels("backward")] == ["add"], "both ways back meet at the stash"


@pytest.mark.parametrize(
    ("name", "arguments"), [("unet", {"depth": 2, "B": 2, "C": 4}), ("amoebanet-d", {"L": 3, "D": 32})]
)
def test_traces_lie_on_a_line(name, arguments):
    tracer = suite_tracer(name, **arguments, size=64)
    probes = [tracer.trace(size) for size in PROBES]
    lines = [fit_line(kinds) for kinds in zip(*(traced.layers for traced in probes), strict=True)]
    for size in (2, 7, 33):
        assert [line.at(size) for line in lines] == list(tracer.trace(size).layers)


class Centred(nn.Module):
    """Its backward pass sums up gradients over the samples, unless there is one sample only."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True)


@pytest.mark.parametrize("size", [1, 2, 3, 40])
def test_the_trace_of_any_size_is_that_of_a_model_that_is_traced_at_it(size):
    module, sample = nn.Sequential(nn.Linear(C, C), Centred()).to("meta"), torch.empty(1, C)
    source = module_source(module, sample)
    assert list(source.layers(size)) == list(Tracer(module, sample).trace(size).layers)


def test_what_is_not_linear_has_no_line():
    class Pairs(nn.Module):
        def forward(self, x):
            return x + (x @ x.T).sum(1, keepdim=True)

    source = module_source(nn.Sequential(nn.Linear(C, C), Pairs()).to("meta"), torch.empty(1, C))
    direct = trace(nn.Sequential(nn.Linear(C, C), Pairs()), 12, C)
    assert sum(kernel.whole.flop for layer in source.layers(12) for kernel in layer.kernels("forward")) == flop(
        direct, "forward"
    )
    assert fit_line([trace(nn.Sequential(Pairs()), size, C).layers[0] for size in PROBES]) is None


def test_a_trace_is_the_same_every_time():
    runs = [suite_tracer("amoebanet-d", L=3, D=32, size=64).trace(3) for _ in range(2)]
    assert runs[0] == runs[1]


def test_layers_made_alike_are_traced_once():
    traced = trace(nn.Sequential(*(nn.Linear(C, C) for _ in range(9))), N, C)
    # The first one computes no gradient of its input.
    assert len({id(layer) for layer in traced.layers}) == 2
    assert traced.layers[1] is traced.layers[8] is not traced.layers[0]


def test_signatures_tell_layers_apart():
    assert signature(nn.Conv2d(4, 4, 3)) == signature(nn.Conv2d(4, 4, 3))
    others = [
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.Conv2d(4, 4, 3).eval(),
        nn.Conv1d(4, 4, 3),
    ]
    frozen = nn.Conv2d(4, 4, 3)
    frozen.weight.requires_grad_(False)
    assert len({signature(layer) for layer in (nn.Conv2d(4, 4, 3), frozen, *others)}) == 6


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    module_source(model, torch.zeros(2, C)).layers(N)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_traces_survive_the_disk(tmp_path):
    tracer = suite_tracer("unet", depth=1, B=1, C=4, size=8)
    options = {"folder": tmp_path, "key": {"model": "x"}}
    kept = ModelSource(lambda: tracer, (3 * 8 * 8 * F32,), **options)
    first = kept.layers(5), kept.layers(1), kept.facts
    again = ModelSource(pytest.fail, (3 * 8 * 8 * F32,), **options)
    assert (again.layers(5), again.layers(1), again.facts) == first
    assert again.facts == tracer.facts()


def test_a_loss_survives_the_disk_in_a_file_of_its_own(tmp_path):
    def source(tracer):
        target = partial(torch.empty, dtype=torch.int64, device="meta")
        return ModelSource(tracer, (C * F32,), functional.cross_entropy, target, folder=tmp_path, key={"model": "x"})

    first = source(lambda: Tracer(nn.Sequential(nn.Linear(C, C)), torch.empty(1, C)))
    found = first.loss(6), first.loss(9)
    assert found[0] != found[1]
    assert len(list(tmp_path.iterdir())) == 2
    again = source(pytest.fail)
    assert (again.loss(6), again.loss(9)) == found


def test_resnet101_is_the_published_one():
    model = resnet101().to("meta")
    assert len(model) == 370
    assert sum(parameter.numel() for parameter in model.parameters()) == 44_549_160


def test_unet_and_amoebanet_have_the_known_operations():
    """48.99 and 15.17 billion multiply-adds per sample."""
    assert round(flop(suite_tracer("unet").trace(2), "forward") / 2 / 2e9, 2) == 48.99
    assert round(flop(suite_tracer("amoebanet-d").trace(2), "forward") / 2 / 2e9, 2) == 15.17
