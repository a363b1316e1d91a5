"""A step in half precision: tensors of two bytes, the peak of their type, and master weights in float32."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench.balance import balance_by_simulation, layer_simulated_times
from gpipe_bench.cli import main
from gpipe_bench.errors import TraceError
from gpipe_bench.kernels.kernel import Parameter
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.settings import OPTIMIZERS
from gpipe_bench.simulator import Model, simulate
from gpipe_bench.simulator.workloads.build import build_workload
from gpipe_bench.simulator.workloads.optimizers import trace_optimizer
from gpipe_bench.suite.simulated_cells import SimulatedCell
from tests.simulator_api.layers import Pop, Stash

H100 = load_profile("h100")
HALVES = ("float16", "bfloat16")
WIDTH = 256
UNET = Model("unet", {"depth": 1, "B": 1, "C": 8, "size": 16})


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


def layers(dtype=torch.float32):
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH, dtype=dtype))


def work(cache, module=None, sample=None, **options):
    module, sample = module or layers(), torch.empty(1, 64, WIDTH) if sample is None else sample
    given = {"balance": [1, 2], "batch_size": 8, "chunks": 2, "profile": H100, "cache": cache} | options
    return build_workload(module, sample=sample, **given)


@pytest.mark.parametrize("precision", HALVES)
def test_passes_are_those_of_a_model_of_that_type(cache, precision):
    dtype = getattr(torch, precision)
    own = work(cache, layers(dtype), torch.empty(1, 64, WIDTH, dtype=dtype))
    cast = work(cache, precision=precision)
    assert cast.partitions == own.partitions


@pytest.mark.parametrize("precision", HALVES)
def test_tensors_have_half_the_bytes(cache, precision):
    single, half = work(cache), work(cache, precision=precision)
    for whole, part in zip(single.partitions, half.partitions, strict=True):
        task, other = whole[4], part[4]
        assert [2 * nbytes for nbytes in other.output_bytes] == list(task.output_bytes)
        for memory in ("forward_memory", "graph_memory", "backward_memory"):
            pairs = zip(getattr(task, memory), getattr(other, memory), strict=True)
            assert all(op.kind == same.kind and op.bytes == 2 * same.bytes for op, same in pairs)
        assert other.backward.duration_ns < task.backward.duration_ns


def test_a_model_of_the_suite(cache):
    def static(precision):
        options = {"balance": [8, 9], "batch_size": 4, "profile": H100, "optimizer": None, "cache": cache}
        made = build_workload(UNET, precision=precision, **options)
        return made.static_bytes, made.partitions[0][4].input_bytes, made.skips[0].bytes[4]

    single = static("float32")
    for precision in HALVES:
        parts, entering, skip = static(precision)
        assert sum(parts) == sum(single[0]) // 2
        assert (*entering, skip) == (single[1][0] // 2, single[2] // 2)


def test_the_model_is_left_as_it_is(cache):
    module = layers()
    work(cache, module, precision="float16")
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert all(parameter.grad is None for parameter in module.parameters())


def test_integers_stay(cache):
    module = nn.Sequential(nn.Embedding(100, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10))
    sample = torch.zeros(1, 16, dtype=torch.int64)
    target = torch.zeros(8, 16, dtype=torch.int64)

    def loss(output, wanted):
        return functional.cross_entropy(output.flatten(0, 1), wanted.flatten())

    made = work(cache, module, sample, precision="bfloat16", loss=loss, target=target)
    assert made.partitions[0][4].input_bytes == (4 * 16 * 8,)


def test_targets_of_real_numbers_are_cast(cache):
    target = torch.empty(1024, 64, WIDTH, device="meta")
    made = [
        work(cache, batch_size=1024, precision=precision, loss=functional.mse_loss, target=target).loss
        for precision in ("float32", "float16")
    ]
    assert made[0].launches == made[1].launches
    assert made[1].duration_ns < made[0].duration_ns


def test_skips_find_their_pops(cache):
    module = nn.Sequential(Stash(), nn.Linear(16, 16), Pop())
    made = work(cache, module, torch.empty(1, 8, 16), precision="float16")
    assert [skip.bytes[4] for skip in made.skips] == [4 * 8 * 16 * 2]


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize(
    ("optimizer", "state"), [("sgd", 0), ("momentum", 4), ("rmsprop", 4), ("adam", 8), ("adamw", 8)]
)
def test_an_optimizer_keeps_weights_and_state_in_float32(cache, precision, optimizer, state):
    made = work(cache, balance=[3], precision=precision, optimizer=optimizer)
    (static,) = made.static
    elements = sum(parameter.numel() for parameter in layers().parameters())
    assert sum(static.resident) == (2 + 4) * elements
    assert static.gradients == 2 * elements
    assert sum(static.state) == state * elements
    assert static.total == (8 + state) * elements


def test_without_an_update_there_are_no_master_weights(cache):
    made = work(cache, balance=[3], precision="float16", optimizer=None)
    assert sum(made.static[0].resident) == sum(2 * parameter.numel() for parameter in layers().parameters())


def test_masters_are_an_option(cache):
    made = work(cache, balance=[3], precision="bfloat16", optimizer="adam", masters=False)
    elements = sum(parameter.numel() for parameter in layers().parameters())
    assert sum(made.static[0].resident) == 2 * elements
    assert sum(made.static[0].state) == 4 * elements
    assert "masters" not in json.loads(SimulatedCell().configuration)
    assert json.loads(SimulatedCell(masters=False).configuration)["masters"] is False


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_casts_the_gradient_and_rounds_the_weight(cache, optimizer):
    single = trace_optimizer(optimizer, ["float32"], cache)["float32"]
    for dtype, more in (("bfloat16", []), ("float16", ["_foreach_mul_"])):
        mixed = trace_optimizer(optimizer, [dtype], cache, masters=True)[dtype]
        expected = sorted([*(kernel.op for kernel in single.kernels), "_to_copy", "_foreach_copy_", *more])
        assert sorted(kernel.op for kernel in mixed.kernels) == expected
        assert mixed.state_per_element == single.state_per_element
        assert mixed.temporary_per_element == single.temporary_per_element + 4
        assert (mixed.master_per_element, single.master_per_element) == (4, 0)


def test_only_halves_have_master_weights(cache):
    traces = trace_optimizer("adam", ["float32", "complex64"], cache, masters=True)
    assert traces == trace_optimizer("adam", ["float32", "complex64"], cache)
    assert Parameter(1, "float32", 4).dtype in traces


@pytest.mark.parametrize("profile", ["v100", "a100", "h100", "h200"])
def test_matrix_units_make_it_faster(cache, profile):
    """More than twice as fast, which a half of the bytes alone could be."""

    def step(precision):
        options = {"balance": [1, 2], "batch_size": 2048, "profile": profile, "precision": precision, "cache": cache}
        return simulate(layers(), sample=torch.empty(1, 64, WIDTH), optimizer=None, **options).step_time_ms

    assert step("float32") > 2 * step("float16")


def test_a_p40_has_no_fast_half(cache):
    p40 = load_profile("p40")
    assert p40.peak_flop_per_s("matmul", "float16") == p40.peak_flop_per_s("matmul", "float32")
    assert p40.uses_winograd("float16")


def test_a_layer_that_cannot_be_cast_is_named():
    module = nn.Sequential(nn.Linear(16, 16), nn.LazyLinear(4))
    with pytest.raises(TraceError, match=r"layer 1 \(LazyLinear\) must run"):
        simulate(module, balance=[1, 1], batch_size=4, sample=torch.empty(1, 16), precision="float16")


def test_balances_in_a_half(cache):
    sample = torch.empty(1024, 64, WIDTH, device="meta")
    single, half = (
        layer_simulated_times(layers(), sample, profile="h100", precision=p) for p in ("float32", "float16")
    )
    assert all(time < other for time, other in zip(half, single, strict=True))
    assert sum(balance_by_simulation(2, layers(), sample, profile="h100", precision="bfloat16")) == 3
    with pytest.raises(ValueError, match="precision must be one of float32, float16, bfloat16, got 'half'"):
        layer_simulated_times(layers(), sample, precision="half")


def test_cells_in_float32_keep_their_ids():
    assert "precision" not in json.loads(SimulatedCell().configuration)
    half = SimulatedCell(precision="bfloat16")
    assert json.loads(half.configuration)["precision"] == "bfloat16"
    assert half.id != SimulatedCell().id


def test_the_command_takes_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["simulate", "--model-args", "depth=2;B=1;C=8;size=32", "--batch-size", "8", "--chunks", "2"]
    with pytest.raises(SystemExit) as caught:
        main([*words, "--precision", "bfloat16", "--profile", "h100"])
    assert not caught.value.code
    assert "autograd current, bfloat16" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main([*words, "--precision", "bf16"])
    assert caught.value.code == 2
    assert "--precision" in capsys.readouterr().err
