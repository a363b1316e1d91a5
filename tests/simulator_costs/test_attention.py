"""Attention is one kernel, as accelerators run it."""

from __future__ import annotations

import random

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import flop_registry, register_flop_formula

from gpipe_bench.kernels.attention import seen_pairs
from gpipe_bench.kernels.cost import duration_ns
from gpipe_bench.kernels.kernel import Alloc, Kernel
from gpipe_bench.kernels.operations import kernels_of
from gpipe_bench.kernels.specs import TensorSpec
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.simulator import simulate
from gpipe_bench.simulator.constants_fit import traced, with_constants
from gpipe_bench.simulator.tracing.layer_trace import trace_layer

HEADS, LENGTH, WIDTH = 4, 256, 32


class Attention(nn.Module):
    def __init__(self, dtype=torch.float32, **options):
        super().__init__()
        self.inner = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH, device="meta", dtype=dtype)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x).view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(*parts, **self.options).transpose(1, 2).flatten(2)


class Written(Attention):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inner(x).view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        return ((query @ key.transpose(-2, -1)).softmax(-1) @ value).transpose(1, 2).flatten(2)


def trace(layer, dtype=torch.float32):
    x = torch.empty(2, LENGTH, HEADS * WIDTH, dtype=dtype, device="meta", requires_grad=True)
    return trace_layer(layer, TensorSpec.of(x), {}).trace


def kernels(steps):
    return [step for step in steps if isinstance(step, Kernel) and "attention" in step.op]


SCORES = 2 * HEADS * LENGTH * LENGTH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_matrix_of_scores_is_made(dtype):
    traced = trace(Attention(dtype), dtype)
    largest = max(step.bytes for step in (*traced.forward, *traced.backward) if isinstance(step, Alloc))
    assert largest < SCORES * dtype.itemsize
    (forward,), (backward,) = kernels(traced.forward), kernels(traced.backward)
    assert forward.dtype == backward.dtype == str(dtype).removeprefix("torch.")
    assert forward.whole.flop == 4 * SCORES * WIDTH
    assert forward.whole.flop < backward.whole.flop < 3 * forward.whole.flop


def test_written_out_it_is_what_it_was():
    assert not kernels(trace(Written()).forward)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"dropout_p": 0.1},
        {"attn_mask": torch.zeros(LENGTH, LENGTH, device="meta")},
        {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="meta")},
        {"scale": 0.5},
    ],
)
def test_its_options(options):
    assert len(kernels(trace(Attention(**options)).forward)) == 1


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 3), (2, 5), (5, 2)])
def test_pairs_that_a_causal_mask_leaves(queries, keys):
    assert seen_pairs(queries, keys) == int(torch.ones(queries, keys).tril().sum())


def test_causal_attention_skips_what_its_mask_hides():
    plain, causal = trace(Attention()), trace(Attention(is_causal=True))
    for direction in ("plain", "forward", "backward"):
        (whole,), (half,) = kernels(getattr(plain, direction)), kernels(getattr(causal, direction))
        assert half.whole.flop * LENGTH * LENGTH == whole.whole.flop * seen_pairs(LENGTH, LENGTH)
        assert half.whole._replace(flop=whole.whole.flop) == whole.whole
    own, other = ([step for step in traced.forward if isinstance(step, Alloc)] for traced in (plain, causal))
    assert own == other, "no memory holds the mask"


def test_a_mask_in_memory_is_read_and_nothing_is_skipped():
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="meta").tril()
    (whole,), (masked,) = (kernels(trace(Attention(**options)).forward) for options in ({}, {"attn_mask": mask}))
    assert masked.whole.flop == whole.whole.flop
    assert masked.whole.bytes_read > whole.whole.bytes_read


@pytest.mark.parametrize("make", ["causal_upper_left", "causal_lower_right"])
def test_a_causal_bias_of_pytorch_is_no_tensor(make):
    bias = pytest.importorskip("torch.nn.attention.bias")
    traced, causal = trace(Attention(attn_mask=getattr(bias, make)(LENGTH, LENGTH))), trace(Attention(is_causal=True))
    assert (traced.forward, traced.backward) == (causal.forward, causal.backward)


def test_an_encoder_layer_with_the_hint_of_a_causal_mask():
    class Causal(nn.TransformerEncoderLayer):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.empty(x.shape[1], x.shape[1], device=x.device)
            return super().forward(x, mask, is_causal=True)

    options = {"dropout": 0.0, "batch_first": True, "device": "meta"}
    flop = [
        kernels(trace(kind(HEADS * WIDTH, HEADS, **options)).forward)[0].whole.flop
        for kind in (nn.TransformerEncoderLayer, Causal)
    ]
    assert flop[1] * LENGTH * LENGTH == flop[0] * seen_pairs(LENGTH, LENGTH)


def test_a_mask_that_is_trained_is_written_out():
    mask = torch.zeros(LENGTH, LENGTH, device="meta", requires_grad=True)
    assert not kernels(trace(Attention(attn_mask=mask)).forward)


def test_shared_keys():
    class Shared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            query = x.view(*x.shape[:2], HEADS, WIDTH).transpose(1, 2)
            return functional.scaled_dot_product_attention(query, query[:, :1], query[:, :1], enable_gqa=True)

    assert len(kernels(trace(Shared()).forward)) == 1


def test_it_is_faster_and_smaller_than_written_out():
    def step(kind):
        layers = nn.Sequential(kind(torch.bfloat16), kind(torch.bfloat16))
        sample = torch.empty(1, 2048, HEADS * WIDTH, dtype=torch.bfloat16, device="meta")
        return simulate(layers, balance=[1, 1], batch_size=64, chunks=4, sample=sample, profile="h100")

    one, other = step(Attention), step(Written)
    assert one.step_time_ms < other.step_time_ms
    assert one.peak_allocated_gib < other.peak_allocated_gib


def test_an_encoder_layer_of_pytorch_has_it():
    layer = nn.TransformerEncoderLayer(HEADS * WIDTH, HEADS, batch_first=True, device="meta")
    assert len(kernels(trace(layer).forward)) == 1


def attended(shape, keys, dtype, drop, *, causal):
    """The kernels of attention, forward and backward, for queries of a shape."""

    def prepare():
        query, key, value = (
            torch.empty(*shape[:2], length, shape[3], dtype=dtype, device="meta", requires_grad=True)
            for length in (shape[2], keys, keys)
        )

        def run():
            out = functional.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=causal)
            return torch.autograd.grad(out, (query, key, value), torch.ones_like(out))

        return run

    found = sorted(kernel for kernel in traced(prepare) if "attention" in kernel.op)
    assert len(found) == 2
    return found


@pytest.mark.parametrize("seed", range(12))
def test_a_trace_keeps_whether_a_call_drops_out_and_how_many_keys_there_are(seed):
    draw = random.Random(seed)
    shape = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 3000), 8 * draw.randint(1, 4)
    keys = draw.choice([shape[2], draw.randint(1, 3000)])
    drop, causal, dtype = (
        draw.choice([0.0, 0.01, 0.9]),
        draw.random() < 0.5,
        draw.choice([torch.float32, torch.float16]),
    )
    for kernel, kind in zip(attended(shape, keys, dtype, drop, causal=causal), ("", "_backward"), strict=True):
        (part,) = kernel.parts
        assert part.kind == f"attention{kind}{'' if drop else '_no_dropout'}"
        assert (part.units, part.blocks) == (kernel.whole.flop, keys)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_layers_of_pytorch_say_whether_they_drop_out(dropout):
    layer = nn.TransformerEncoderLayer(HEADS * WIDTH, HEADS, dropout=dropout, batch_first=True, device="meta")
    found = trace(layer)
    kinds = [kernel.parts[0].kind for kernel in kernels([*found.forward, *found.backward])]
    assert kinds == (
        ["attention", "attention_backward"] if dropout else ["attention_no_dropout", "attention_backward_no_dropout"]
    )


def test_an_attention_of_the_users_own_whose_arguments_do_not_say_is_priced_by_its_flops():
    with torch.library._scoped_library("mine", "FRAGMENT") as library:
        library.define("attention(Tensor q, bool is_causal) -> Tensor")
        library.impl("attention", lambda q, is_causal: torch.empty_like(q), "Meta")
        own = torch.ops.mine.attention
        register_flop_formula(own)(lambda *_, **__: 1000)
        try:
            q = torch.empty(2, 4, 8, 16, device="meta")
            (kernel,) = kernels_of(own.default, (q, True), {}, own(q, True))
        finally:
            del flop_registry[own]
    assert (kernel.whole.flop, kernel.parts[0].units, kernel.parts[0].blocks) == (1000, 1000, 0)


def test_no_keys_at_all_cost_nothing_but_a_start():
    for kernel in attended((2, 4, 8, 16), 0, torch.float32, 0.0, causal=True):
        assert kernel.whole.flop == 0


# Of two samples with 12 heads of 64 in float16, forward and backward: what these profiles were fitted with.
DURATIONS = {
    ("p40", 512, False): (271202, 678004),
    ("p40", 512, True): (135866, 339664),
    ("p40", 8192, False): (69427639, 173569097),
    ("p40", 8192, True): (34718057, 86795142),
    ("p100", 512, False): (342939, 857347),
    ("p100", 512, True): (171804, 429511),
    ("p100", 8192, False): (87792369, 219480922),
    ("p100", 8192, True): (43901543, 109753857),
    ("v100", 512, False): (18407, 46018),
    ("v100", 512, True): (9221, 23054),
    ("v100", 8192, False): (4712193, 11780482),
    ("v100", 8192, True): (2356384, 5890960),
}


@pytest.mark.parametrize("drop", [0.0, 0.1])
@pytest.mark.parametrize(("name", "length", "causal"), DURATIONS)
def test_profiles_without_constants_know_neither_dropout_nor_length(name, length, causal, drop):
    found = attended((2, 12, length, 64), length, torch.float16, drop, causal=causal)
    times = tuple(duration_ns(kernel, load_profile(name)) for kernel in found)
    assert times == DURATIONS[name, length, causal]


H200 = load_profile("h200")
SHARES = {
    f"attention_{told}": share
    for told, share in (
        ("half", 0.1),
        ("no_dropout_half_1k", 0.2),
        ("no_dropout_half_8k", 0.4),
        ("backward_half", 0.12),
        ("backward_no_dropout_half_1k", 0.24),
        ("backward_no_dropout_half_8k", 0.48),
    )
}
SLOW = with_constants(H200, SHARES)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("drop", "length", "share"),
    [
        (0.0, 1024, 0.2),
        (0.0, 2048, 0.28),
        (0.0, 4096, 0.35),
        (0.0, 8192, 0.4),
        (0.0, 16384, 0.4),
        (0.0, 512, 0.2),
        (0.1, 1024, 0.1),
        (0.1, 8192, 0.1),
        (0.1, 512, 0.1),
    ],
)
def test_attention_takes_the_share_of_its_dropout_and_length(drop, length, share, causal):
    forward, backward = attended((8, 12, length, 64), length, torch.bfloat16, drop, causal=causal)
    # A FLOP at 2048 keys takes 3/7 of the way from 8192 to 1024 longer, and at 4096 a seventh of it.
    assert duration_ns(forward, SLOW) == pytest.approx(2000 + 1e9 * forward.whole.flop / (share * 989.4e12), abs=1)
    assert duration_ns(backward, SLOW) == pytest.approx(
        2000 + 1e9 * backward.whole.flop / (1.2 * share * 989.4e12), abs=1
    )


@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_a_step_changes_with_the_constants_of_its_own_attention_alone(tmp_path, drop):
    def step_ms(profile):
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(profile.model_dump(mode="json", exclude_none=True)))
        layers = nn.Sequential(Attention(torch.bfloat16, dropout_p=drop, is_causal=True))
        sample = torch.empty(1, 2048, HEADS * WIDTH, dtype=torch.bfloat16, device="meta")
        return simulate(layers, balance=[1], batch_size=64, sample=sample, profile=path).step_time_ms

    def halved(dropout):
        names = [name for name in SHARES if ("no_dropout" not in name) == dropout]
        return with_constants(H200, {name: H200.constants[name] / 2 for name in names})

    before = step_ms(H200)
    assert step_ms(halved(drop == 0)) == before < step_ms(halved(drop > 0))


# TFLOPS of Triton's kernel with heads of 64 on an A100, forward without dropout, at 1k, 2k, 4k, 8k and 16k tokens:
# triton-lang.org, tutorial "Fused Attention".
PRINTED = {
    True: (111.678584, 136.477584, 150.000308, 160.366887, 164.262333),
    False: (141.414536, 159.680652, 160.625979, 163.402601, 166.629837),
}


@pytest.mark.parametrize("causal", PRINTED)
def test_rates_between_two_lengths_are_near_those_that_were_printed(causal):
    a100 = load_profile("a100")
    short, _, _, long, _ = (rate / 312 for rate in PRINTED[causal])
    told = {"attention_no_dropout_half_1k": short, "attention_no_dropout_half_8k": long}
    for step, rate in enumerate(PRINTED[causal]):
        length = 1024 * 2**step
        forward, _ = attended((4, 32, length, 64), length, torch.float16, 0.0, causal=causal)
        law_s = (duration_ns(forward, with_constants(a100, told)) - 2000) / 1e9
        assert forward.whole.flop / law_s / 1e12 == pytest.approx(rate, rel=0.05)
