"""Attention is one kernel, as accelerators run it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_bench.simulator import simulate
from gpipe_bench.simulator.tracing.attention import seen_pairs
from gpipe_bench.simulator.tracing.layer_trace import trace_layer
from gpipe_bench.simulator.tracing.specs import TensorSpec
from gpipe_bench.simulator.tracing.steps import Alloc, Kernel

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
    assert forward.flop == 4 * SCORES * WIDTH
    assert forward.flop < backward.flop < 3 * forward.flop


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
        assert half.flop * LENGTH * LENGTH == whole.flop * seen_pairs(LENGTH, LENGTH)
        assert half._replace(flop=whole.flop, parts=None) == whole._replace(parts=None)
    own, other = ([step for step in traced.forward if isinstance(step, Alloc)] for traced in (plain, causal))
    assert own == other, "no memory holds the mask"


def test_a_mask_in_memory_is_read_and_nothing_is_skipped():
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="meta").tril()
    (whole,), (masked,) = (kernels(trace(Attention(**options)).forward) for options in ({}, {"attn_mask": mask}))
    assert masked.flop == whole.flop
    assert masked.bytes_read > whole.bytes_read


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
        kernels(trace(kind(HEADS * WIDTH, HEADS, **options)).forward)[0].flop
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
