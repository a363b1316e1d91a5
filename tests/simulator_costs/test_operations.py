"""Which kernels operations launch, with FLOPs and bytes worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.simulator_costs.layers import F32, flop, ops, trace

N, C, S = 4, 8, 16
PLANE = N * C * S * S * F32


def only(traced, direction):
    (kernel,) = traced.layers[0].kernels(direction)
    return kernel


def test_3x3_convolution():
    kernel = only(trace(nn.Sequential(nn.Conv2d(C, C, 3, padding=1, bias=False)), N, C, S, S), "forward")
    weight = C * C * 9 * F32
    assert (kernel.op, kernel.whole.kind, kernel.launches) == ("convolution", "conv3x3_stride1", 1)
    assert kernel.whole.flop == 2 * N * S * S * C * C * 9
    assert (kernel.whole.bytes_read, kernel.whole.bytes_written) == (PLANE + weight, PLANE)
    assert kernel.whole.scratch == 2.25 * 2 * PLANE + 4 * weight


@pytest.mark.parametrize(
    ("convolution", "kind"),
    [
        (nn.Conv2d(C, C, 1), "other_conv_matmul"),
        (nn.Conv2d(C, C, 1, stride=2), "other_conv_matmul"),
        (nn.Conv2d(C, C, (1, 7)), "spatial_conv"),
        (nn.Conv2d(C, C, 3, stride=2), "spatial_conv"),
        (nn.Conv2d(C, C, 3, dilation=2), "spatial_conv"),
        (nn.Conv2d(C, C, 3, groups=2), "spatial_conv"),
    ],
)
def test_other_convolutions_have_no_winograd(convolution, kind):
    kernel = only(trace(nn.Sequential(convolution), N, C, S, S), "forward")
    assert (kernel.whole.kind, kernel.whole.scratch) == (kind, 0)


def test_first_layer_computes_no_gradient_of_data():
    conv = nn.Conv2d(C, C, 3, padding=1, bias=False)
    traced = trace(nn.Sequential(conv, nn.Conv2d(C, C, 3, padding=1)), N, C, S, S)
    first, second = traced.layers
    assert [kernel.op for kernel in first.kernels("backward")] == ["convolution_backward_weight", "add_"]
    assert [kernel.op for kernel in second.kernels("backward")] == [
        "convolution_backward_data",
        "convolution_backward_weight",
        "convolution_backward_bias",
        "add_",
        "add_",
    ]


@pytest.mark.parametrize(
    ("module", "shape", "dtype"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, C, 3), nn.ReLU(), nn.Conv2d(C, C, 1)), (N, 3, S, S), torch.float32),
        (lambda: nn.Sequential(nn.Linear(C, C), nn.GELU(), nn.Linear(C, 3)), (N, 5, C), torch.float32),
        (lambda: nn.Sequential(nn.Embedding(50, C), nn.Linear(C, 16)), (N, 5), torch.int64),
        (lambda: nn.Sequential(nn.ConvTranspose2d(C, C, 4, 2), nn.BatchNorm2d(C)), (N, C, S, S), torch.float32),
    ],
)
def test_flops_are_those_that_pytorch_counts(module, shape, dtype):
    model = module()
    x = torch.zeros(shape, dtype=dtype)
    with FlopCounterMode(display=False) as forward:
        y = model(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    traced = trace(module(), *shape, dtype=dtype)
    assert flop(traced, "forward") == flop(traced, "plain") == forward.get_total_flops()
    assert flop(traced, "backward") == backward.get_total_flops()


def test_batch_norm_reads_its_input_twice():
    forward = list(trace(nn.Sequential(nn.BatchNorm2d(C)), N, C, S, S).layers[0].kernels("forward"))
    norm = next(kernel for kernel in forward if kernel.op == "native_batch_norm")
    assert norm.launches == 2
    assert norm.whole.bytes_read == 2 * (PLANE + 4 * C * F32)
    assert norm.whole.bytes_written == PLANE + 2 * C * F32


def test_dropout_is_one_kernel_with_a_mask_of_bytes():
    kernel = only(trace(nn.Sequential(nn.Dropout(0.1)), N, C, S, S), "forward")
    assert (kernel.op, kernel.whole.bytes_read, kernel.whole.bytes_written) == (
        "native_dropout",
        PLANE,
        PLANE + PLANE // F32,
    )


def test_an_embedding_reads_rows_not_the_table():
    kernel = only(trace(nn.Sequential(nn.Embedding(10**6, C)), N, 5, dtype=torch.int64), "forward")
    assert kernel.whole.bytes_read == N * 5 * (C * F32 + 8)


def test_an_encoder_layer_is_products_one_kernel_of_attention_and_norms():
    found = ops(trace(nn.Sequential(nn.TransformerEncoderLayer(C, 2, 16, batch_first=True)), N, 5, C), "forward")
    assert found.count("_scaled_dot_product_efficient_attention") == 1
    assert "bmm" not in found
    assert found.count("native_layer_norm") == 2


def test_attention_that_gives_its_weights_is_matrix_products_and_a_softmax():
    class Weights(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)

    found = ops(trace(nn.Sequential(Weights(C, 2, batch_first=True)), N, 5, C), "forward")
    assert found.count("bmm") + found.count("baddbmm") == 2
    assert "_safe_softmax" in found or "_softmax" in found


def test_views_launch_nothing():
    assert ops(trace(nn.Sequential(nn.Flatten(), nn.Unflatten(1, (C, S, S))), N, C, S, S), "forward") == []


@pytest.mark.parametrize(
    ("pool", "windows"), [(nn.AvgPool2d(3, 1, 1), 3), (nn.AvgPool2d(2), 1), (nn.AvgPool2d(3, 2), 2)]
)
def test_windows_that_overlap_read_their_rows_again(pool, windows):
    assert only(trace(nn.Sequential(pool), N, C, S, S), "forward").whole.bytes_read == windows * PLANE


@pytest.mark.parametrize("groups", [1, 2, C])
def test_each_gradient_of_a_convolution_takes_as_many_products_as_the_convolution(groups):
    """So a convolution in groups is cheaper by as much in both directions."""
    layers = nn.Sequential(nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 3, padding=1, groups=groups))
    traced = trace(layers, 2, C, 8, 8)
    kernels = [kernel for kernel in traced.layers[1].kernels("backward") if kernel.whole.flop]
    assert [kernel.whole.flop for kernel in kernels] == [2 * 2 * 8 * 8 * C * C // groups * 9] * 2
