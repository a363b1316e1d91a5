"""Workloads: partitions of a model with their kernels, memory, skips and static bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench.errors import BalanceError
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.models.table import MODELS
from gpipe_bench.simulator.tracing import model_trace
from gpipe_bench.simulator.workloads import optimizer_trace, optimizers, sources
from gpipe_bench.simulator.workloads.build import build_workload
from gpipe_bench.simulator.workloads.optimizers import trace_optimizer
from gpipe_bench.simulator.workloads.workload import Workload, gradient_name, input_name
from gpipe_bench.skip.layout import inspect_skip_layout
from gpipe_bench.step.request import Model, microbatch_sizes
from tests.simulator_costs.layers import F32, live_after

P40 = load_profile("p40")
UNET = {"depth": 2, "B": 2, "C": 4, "size": 32}
LAYERS = MODELS["unet"].layers(MODELS["unet"].check(UNET))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


def unet(cache, balance, batch_size=16, chunks=4, **others) -> Workload:
    options = {"profile": P40, "cache": cache} | others
    return build_workload(Model("unet", UNET), balance=balance, batch_size=batch_size, chunks=chunks, **options)


@pytest.mark.parametrize(("batch_size", "chunks"), [(128, 8), (272, 32), (7, 3), (3, 8), (1, 1), (10, 4)])
def test_sizes_are_those_of_chunk(batch_size, chunks):
    assert list(microbatch_sizes(batch_size, chunks)) == [len(part) for part in torch.empty(batch_size).chunk(chunks)]


def test_cutting_a_model_changes_no_work(cache):
    (whole,) = unet(cache, [LAYERS]).partitions
    parts = unet(cache, [9, 10, LAYERS - 19]).partitions
    for name in ("forward", "recompute", "backward"):
        works = [getattr(part[4], name) for part in parts]
        assert sum(work.duration_ns for work in works) == getattr(whole[4], name).duration_ns
        assert sum(work.launches for work in works) == getattr(whole[4], name).launches


def test_what_leaves_a_partition_enters_the_next(cache):
    parts = unet(cache, [9, 10, LAYERS - 19]).partitions
    assert parts[0][4].input_bytes == (4 * 3 * 32 * 32 * F32,)
    assert parts[1][4].input_bytes == parts[0][4].output_bytes
    assert parts[2][4].input_bytes == parts[1][4].output_bytes


def test_skips_go_where_the_engine_sends_them(cache):
    balance = [9, 10, LAYERS - 19]
    model = MODELS["unet"].build(**UNET)
    parts = [model[sum(balance[:j]) : sum(balance[: j + 1])] for j in range(3)]
    routes = [route for route in inspect_skip_layout(parts).routes.values() if route[0] != route[1]]
    skips = unet(cache, balance).skips
    assert [(skip.source, skip.target) for skip in skips] == routes
    assert skips[0].bytes == {4: 4 * 4 * 32 * 32 * F32}


@pytest.mark.parametrize("balance", [[LAYERS], [10, 10, LAYERS - 20], [4, 6, 12, LAYERS - 22]])
def test_every_block_is_freed_once_or_leaves(cache, balance):
    for part in unet(cache, balance, batch_size=15).partitions:
        for work in part.values():
            left, _ = live_after(work, "graph_memory", "backward_memory")
            kept = {op.block for op in work.backward_memory if op.kind == "free"}.intersection(work.leaving)
            assert set(left) == {*work.leaving, *work.returning} - kept
            plain, _ = live_after(work, "forward_memory")
            assert set(work.leaving) <= set(plain)
            assert len(plain) <= len(work.output_bytes) + 2, "without a graph only outputs and skips are left"


def test_a_tensor_that_leaves_twice_is_one_block(cache):
    """Cut behind a stash, the output is the skip as well: one block with two ways out."""
    first = unet(cache, [9, LAYERS - 9]).partitions[0][4]
    assert len(first.leaving) == 2
    assert len(set(first.leaving)) == 1


def linear_chain(layers, balance):
    model = nn.Sequential(*layers)
    sample = torch.ones(4, 8)
    parts = build_workload(model, balance=balance, batch_size=4, profile=P40, sample=sample).partitions
    return [part[4] for part in parts]


def test_an_input_that_passes_through_keeps_its_name():
    _, middle, _ = linear_chain([nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8)], [1, 1, 1])
    assert (middle.leaving, middle.returning) == ((input_name(0),), (gradient_name(0),))


@pytest.mark.parametrize(
    ("first", "second", "keeps_output", "keeps_input"),
    [
        (nn.Linear(8, 8), nn.Linear(8, 8), False, True),
        (nn.ReLU(), nn.Linear(8, 8), True, True),
        (nn.Linear(8, 8), nn.ReLU(), False, False),
        (nn.Linear(8, 8), nn.GELU(), False, True),
        (nn.Sigmoid(), nn.Tanh(), True, False),
    ],
)
def test_graphs_keep_what_autograd_saves_of_what_crosses_a_boundary(first, second, keeps_output, keeps_input):
    one, two = linear_chain([nn.Sequential(nn.Linear(8, 8), first), second], [1, 1])
    first_frees, second_frees = ({op.block for op in work.backward_memory if op.kind == "free"} for work in (one, two))
    assert (one.leaving[0] in first_frees) == keeps_output
    assert (input_name(0) in second_frees) == keeps_input


@pytest.mark.parametrize(("layer", "kinds"), [(nn.Linear(8, 8), {"view"}), (nn.LayerNorm(8), {"gradient"})])
def test_gradients_that_are_views_are_named(layer, kinds):
    (work,) = linear_chain([layer], [1])
    assert {op.kind for op in work.backward_memory} & {"view", "gradient"} == kinds


def test_graphs_keep_more_than_passes_without(cache):
    (work,) = (part[4] for part in unet(cache, [LAYERS]).partitions)
    kept, peak = live_after(work, "graph_memory")
    plain, plain_peak = live_after(work, "forward_memory")
    assert sum(kept.values()) > 5 * sum(plain.values())
    assert peak > plain_peak


def test_scratch_memory_depends_on_the_algorithm(cache):
    with_winograd = unet(cache, [LAYERS]).partitions[0][4]
    without = unet(cache, [LAYERS], profile=load_profile("a100")).partitions[0][4]
    assert len(with_winograd.graph_memory) > len(without.graph_memory)
    assert live_after(with_winograd, "graph_memory")[0].values() != {}
    assert sum(live_after(with_winograd, "graph_memory")[0].values()) == sum(
        live_after(without, "graph_memory")[0].values()
    )


@pytest.mark.parametrize(
    ("optimizer", "scale"), [("sgd", 2), ("rmsprop", 3), ("momentum", 3), ("adam", 4), ("adamw", 4), (None, 2)]
)
def test_static_bytes_are_exact(cache, optimizer, scale):
    parameters = sum(parameter.numel() for parameter in MODELS["unet"].build(**UNET).parameters())
    work = unet(cache, [20, LAYERS - 20], optimizer=optimizer)
    assert sum(work.static_bytes) == scale * F32 * parameters
    assert len(work.optimizer) == (0 if optimizer is None else 2)


def test_adamw_is_adam_and_a_multiplication_of_the_weights(cache):
    adam, adamw = (trace_optimizer(name, ["float32"], cache)["float32"] for name in ("adam", "adamw"))
    more = Counter(kernel.op for kernel in adamw.kernels) - Counter(kernel.op for kernel in adam.kernels)
    assert more == {"_foreach_mul_": 1}
    assert len(adamw.kernels) == len(adam.kernels) + 1
    assert replace(adamw, kernels=adam.kernels) == adam


def test_published_model_memory():
    """AmoebaNet-D (18, 416) with RMSprop: 12 bytes per parameter, 3.57 GiB; the rest is running statistics."""
    spec = MODELS["amoebanet-d"]
    with torch.device("meta"):
        model = spec.build(D=416)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    work = build_workload(
        model, balance=[24], batch_size=1, profile=P40, optimizer="rmsprop", sample=torch.empty(1, 3, 224, 224)
    )
    assert work.static_bytes[0] - buffers == 12 * 319_024_120


def test_any_module():
    model = nn.Sequential(nn.Embedding(100, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 5))
    work = build_workload(
        model,
        balance=[1, 2],
        batch_size=6,
        chunks=2,
        profile=P40,
        sample=torch.zeros(1, 7, dtype=torch.int64),
        loss=lambda output, target: functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        target=torch.zeros(6, 7, dtype=torch.int64),
    )
    assert work.microbatch_sizes == (3, 3)
    assert work.partitions[0][3].input_bytes == (3 * 7 * 8,)
    assert work.partitions[1][3].input_bytes == (3 * 7 * 8 * F32,)
    assert work.partitions[1][3].output_bytes == (3 * 7 * 5 * F32,)
    assert work.loss.launches > 2
    assert all(part[3].backward.duration_ns > 0 for part in work.partitions)


def test_what_is_on_disk_is_not_traced_again(tmp_path_factory, tmp_path, monkeypatch):
    """Neither layers nor loss nor optimizer, and the workload is the same."""
    balance = [9, 10, LAYERS - 19]
    # A folder of its own: kinds of scratch memory are numbered as the layers of a model are met.
    expected = unet(tmp_path_factory.mktemp("others"), balance)
    assert unet(tmp_path, balance) == expected

    def never(*_, **__):
        raise AssertionError("traced again")

    sources._kept_source.cache_clear()
    optimizers._kept_trace.cache_clear()
    for module, name in ((model_trace, "Tracer"), (model_trace, "trace_loss"), (optimizer_trace, "trace_step")):
        monkeypatch.setattr(module, name, never)
    assert unet(tmp_path, balance) == expected
    # A file for the layers, one for parameters and skips, one for the loss, and one for the optimizer.
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("balance", [[], [0, LAYERS], [LAYERS - 1], [-1, LAYERS + 1]])
def test_balances_that_do_not_fit(cache, balance):
    with pytest.raises(BalanceError, match=str(LAYERS)):
        unet(cache, balance)


def test_arguments_that_are_wrong():
    module = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="optimizer"):
        build_workload(module, balance=[1], batch_size=1, profile=P40, sample=torch.zeros(1, 2), optimizer="sgdm")
    with pytest.raises(ValueError, match="chunks"):
        build_workload(module, balance=[1], batch_size=1, chunks=0, profile=P40, sample=torch.zeros(1, 2))
