"""I and W together do what the backward pass does, and free what it frees."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_bench.kernels.kernel import NO_BLOCK
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.models.table import MODELS
from gpipe_bench.simulator.tracing.layer_trace import trace_split
from gpipe_bench.simulator.workloads.build import build_workload
from gpipe_bench.simulator.workloads.workload import NOTHING
from tests.simulator_costs.layers import suite_tracer

SMALL = {
    "unet": {"depth": 2, "B": 1, "C": 4, "size": 16},
    "amoebanet-d": {"L": 3, "D": 16, "size": 64, "classes": 10},
    "vit": {"L": 2, "D": 32, "heads": 2, "size": 32, "patch": 8, "classes": 10},
    "gpt2": {"L": 2, "D": 32, "heads": 2, "vocabulary": 64, "context": 16},
}
# One node of autograd gives the gradients of input and weights: it runs once for each, and reads its operands twice.
REPEATED = {"native_batch_norm_backward", "native_layer_norm_backward"}
PROFILE = load_profile("p40")


def workload(module, *shape, balance, **options):
    x = torch.empty(shape, device="meta")
    given = {"balance": balance, "batch_size": shape[0], "profile": PROFILE, "sample": x, "split": True, **options}
    return build_workload(module.to("meta"), **given)


def splits(work):
    found = [task for tasks in work.partitions for task in tasks.values()]
    return [task for one in found for task in (one, one.checkpointed) if task is not None]


def frees(*lists):
    return Counter(op.block for ops in lists for op in ops if op.kind not in {"alloc", "scratch"})


def allocs(*lists):
    return Counter(op.block for ops in lists for op in ops if op.kind == "alloc")


def check_frees(task):
    there = allocs(task.graph_memory)
    made = allocs(task.split.inputs_memory, task.split.weights_memory)
    gone = frees(task.split.inputs_memory, task.split.weights_memory)
    assert max((there + made).values(), default=1) == 1
    assert max(gone.values(), default=1) == 1
    kept = {block for block in frees(task.backward_memory) if block < 0 or block in there}
    assert kept == {block for block in gone if block < 0 or block in there}
    assert made.keys() - gone.keys() <= set(task.split.returning)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


class Custom(nn.Module):
    """A linear layer by a custom function."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return Product.apply(x, self.weight)


class Checkpoint(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


@pytest.mark.parametrize("name", SMALL)
def test_both_parts_run_the_kernels_of_the_backward_pass(name):
    tracer = suite_tracer(name, **SMALL[name])
    for place, layer in enumerate(tracer.trace(4).layers):
        if set(layer.input_gradients) <= {NO_BLOCK}:
            continue
        split = trace_split(*tracer.arguments(layer))
        # Both make their own copies of operands that are not dense.
        runs = [layer.kernels("backward"), split.kernels("inputs"), split.kernels("weights")]
        whole, inputs, weights = (Counter(kernel._replace(parts=None) for kernel in run) for run in runs)
        parts = inputs + weights
        assert {kernel.op for kernel in (whole - parts) + (parts - whole)} <= REPEATED, place


@pytest.mark.parametrize("name", SMALL)
def test_both_parts_free_what_the_backward_pass_frees(name):
    arguments = MODELS[name].check(SMALL[name])
    module = MODELS[name].build(**arguments)
    sample, _ = MODELS[name].make_batch(1, arguments)
    layers = len(module)
    for cuts in (2, 3, 5):
        balance = [layers // cuts] * (cuts - 1) + [layers - layers // cuts * (cuts - 1)]
        options = {"batch_size": 4, "chunks": 2, "profile": PROFILE, "sample": sample, "split": True}
        for task in splits(build_workload(module, balance=balance, **options)):
            check_frees(task)


def test_nothing_else_changes():
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    split = workload(module, 4, 8, balance=[1, 2, 2], chunks=2)
    plain = workload(module, 4, 8, balance=[1, 2, 2], chunks=2, split=False)

    def without(task):
        return replace(task, split=None, checkpointed=task.checkpointed and replace(task.checkpointed, split=None))

    parts = tuple({size: without(task) for size, task in tasks.items()} for tasks in split.partitions)
    assert replace(split, partitions=parts) == plain


def test_the_first_partition_has_all_of_it_in_w():
    (first, second) = splits(workload(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 4, 8, balance=[1, 1]))
    assert (first.split.inputs, first.split.inputs_memory) == (NOTHING, ())
    assert (first.split.weights, first.split.weights_memory) == (first.backward, first.backward_memory)
    assert min(second.split.inputs.launches, second.split.weights.launches) > 0


def test_a_partition_that_learns_nothing_has_neither():
    module = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    (first, second) = splits(workload(module, 4, 8, balance=[1, 1]))
    assert (first.split.inputs, first.split.weights) == (NOTHING, NOTHING)
    assert (second.split.inputs, second.split.weights) == (NOTHING, second.backward)


def test_layers_without_weights_have_nothing_in_w():
    (_, second) = splits(workload(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Softmax(-1)), 4, 8, balance=[1, 2]))
    assert second.split.inputs == second.backward
    assert (second.split.weights, second.split.weights_memory) == (NOTHING, ())


def test_a_weight_that_is_used_twice_has_all_of_it_in_i():
    shared = nn.Linear(8, 8)
    module = nn.Sequential(nn.Linear(8, 8), nn.Sequential(shared, nn.Tanh(), shared), nn.Linear(8, 8))
    (_, second) = splits(workload(module, 4, 8, balance=[1, 2]))
    assert (second.split.inputs, second.split.inputs_memory) == (second.backward, second.backward_memory)
    assert (second.split.weights, second.split.weights_memory) == (NOTHING, ())


@pytest.mark.parametrize("layers", [[Custom], [Custom, nn.Tanh], [nn.Tanh, Custom, Custom]])
def test_gradients_of_weights_of_custom_functions_are_in_i(layers):
    (_, second) = splits(
        workload(nn.Sequential(nn.Linear(8, 8), *[layer() for layer in layers]), 4, 8, balance=[1, len(layers)])
    )
    assert (second.split.inputs, second.split.weights) == (second.backward, NOTHING)
    check_frees(second)


@pytest.mark.parametrize("inner", [False, True])
def test_w_keeps_the_weights_of_a_linear_layer_beside_a_custom_function(inner):
    layers = [Custom(), nn.Linear(8, 8), Custom()]
    module = (
        nn.Sequential(nn.Linear(8, 8), nn.Sequential(*layers)) if inner else nn.Sequential(nn.Linear(8, 8), *layers)
    )
    (_, second) = splits(workload(module, 4, 8, balance=[1, len(module) - 1]))
    (_, alone) = splits(workload(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 4, 8, balance=[1, 1]))
    assert second.split.weights == alone.split.weights
    check_frees(second)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # PyTorch's, of the pass without a graph
def test_a_reentrant_checkpoint_has_all_of_its_partition_in_i():
    layers = [nn.Linear(8, 8), Checkpoint(nn.Linear(8, 8), nn.Tanh())]
    (_, second) = splits(workload(nn.Sequential(nn.Linear(8, 8), *layers), 4, 8, balance=[1, 2]))
    assert (second.split.inputs, second.split.inputs_memory) == (second.backward, second.backward_memory)
    assert (second.split.weights, second.split.weights_memory) == (NOTHING, ())


def test_a_linear_layer_keeps_its_input_and_the_gradient_of_its_output():
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh())
    (_, second) = splits(workload(module, 4, 8, balance=[1, 2]))
    gone = frees(second.split.weights_memory)
    noted = allocs(second.split.inputs_memory).keys() & gone.keys()
    assert -2 in gone, "the input of the linear layer"
    assert len(noted) == 1, "the gradient that Tanh gave"
    assert frees(second.split.inputs_memory).keys() >= {-3}, "the gradient that came is not needed any more"
    assert set(second.leaving) & frees(second.split.inputs_memory).keys(), "the result of Tanh goes with I"
