"""Which kernels an operation really runs, and the unit that bounds each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench.kernels.kernel import ACCUMULATE
from tests.simulator_costs.layers import F32, trace

N, C, S = 4, 64, 12
PLANE = N * C * S * S


class Of(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Scale(nn.Module):
    """So that the next layer's input needs a gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.weight


def parts(function, *shape, direction="forward", dtype=torch.float32):
    layer = function if isinstance(function, nn.Module) else Of(function)
    kernels = trace(nn.Sequential(Scale(), layer).to(dtype), *shape, dtype=dtype).layers[1].kernels(direction)
    return [part for kernel in kernels for part in kernel.parts]


def kinds(*args, **kwargs):
    return [part.kind for part in parts(*args, **kwargs)]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x + x, "stream"),
        (lambda x: x.relu(), "stream"),
        (lambda x: x.transpose(1, 2).relu(), "stream"),
        (lambda x: x * x[:, :, :1, :1], "strided"),
        (lambda x: x + x[0, 0, 0], "strided"),
        (lambda x: x[:, :, 1:].relu(), "strided"),
        (lambda x: x + x.transpose(2, 3), "transposed"),
        (lambda x: x.transpose(1, 3).contiguous(), "transposed"),
        (nn.functional.gelu, "heavy"),
        (lambda x: torch.cat([x, x]), "stream"),
        (lambda x: torch.stack([x.transpose(1, 2), x.transpose(1, 2)]), "strided"),
        (lambda x: nn.functional.interpolate(x, scale_factor=2), "strided"),
        (lambda x: x.sum((0, 2, 3)), "stream"),
        (lambda x: x.sum((0, 1, 2)), "column_sum"),
        (lambda x: x.amax(3), "stream"),
    ],
)
def test_elementwise_operations_by_how_their_tensors_are_laid_out(function, kind):
    assert kinds(function, N, C, S, S) == [kind]


def test_axes_of_one_element_do_not_count():
    assert kinds(lambda x: x.transpose(1, 2) + x.transpose(1, 2).contiguous(), N, 1, S)[-1] == "stream"


def test_what_is_not_dense_is_copied_before_a_layer_norm():
    assert kinds(lambda x: nn.functional.layer_norm(x.transpose(1, 2), (C,)), N, C, S) == ["transposed", "layer_norm"]


def test_a_softmax_multiplies_first_in_its_backward_pass():
    first, main = parts(nn.Softmax(-1), N, S, S, direction="backward")
    size = N * S * S * F32
    assert (first.kind, first.bytes, main.kind, main.bytes) == ("stream", 3 * size, "heavy", 3 * size)


def test_a_max_pool_fills_its_gradient_first():
    assert kinds(nn.MaxPool2d(2), N, C, S, S, direction="backward") == ["stream", "max_pool_backward"]


def test_an_input_of_an_average_pool_is_in_as_many_windows_as_its_kernel_has_pixels():
    assert parts(nn.AvgPool2d(3, 1, 1), N, C, S, S)[0].units == PLANE
    assert parts(nn.AvgPool2d(3, 1, 1), N, C, S, S, direction="backward")[0].units == (4 + 9) * PLANE


@pytest.mark.parametrize(
    ("module", "dtype", "kind", "blocks"),
    [
        (nn.BatchNorm2d(C), torch.float32, "cudnn_norm", C),
        (nn.BatchNorm2d(C), torch.bfloat16, "norm", C),
        (nn.InstanceNorm2d(C), torch.float32, "norm", N * C),
    ],
)
def test_norms_have_a_block_for_each_channel_or_plane(module, dtype, kind, blocks):
    (norm,) = (part for part in parts(module, N, C, S, S, dtype=dtype) if "norm" in part.kind)
    assert (norm.kind, norm.units, norm.blocks) == (kind, PLANE, blocks)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Conv2d(C, C, 3, padding=1, bias=False), ["transposes", "convolution", "transposes"]),
        (nn.Conv2d(C, C, 1, bias=False), ["convolution"]),
        (nn.Conv2d(C, C, 1, stride=2, bias=False), ["transposes", "convolution", "transposes"]),
        (nn.Conv2d(C, C, 1), ["convolution", "strided"]),
        (nn.Conv2d(C, C, 7, padding=3, groups=C, bias=False), ["depthwise"]),
        (nn.Conv2d(C, C, 3, bias=False).to(memory_format=torch.channels_last), ["convolution"]),
    ],
)
def test_a_convolution_transposes_what_has_no_channels_last(module, expected):
    layers = [Of(lambda x: x.contiguous(memory_format=torch.channels_last)), module]
    last = module.weight.is_contiguous(memory_format=torch.channels_last) and module.kernel_size != (1, 1)
    chosen = layers if last and module.groups == 1 else layers[1:]
    kernels = trace(nn.Sequential(*chosen), N, C, S, S).layers[-1].kernels("forward")
    assert [part.kind for kernel in kernels for part in kernel.parts] == expected


CONVOLUTIONS = {
    1: (nn.Conv1d, nn.ConvTranspose1d),
    2: (nn.Conv2d, nn.ConvTranspose2d),
    3: (nn.Conv3d, nn.ConvTranspose3d),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_each_pass_of_a_convolution_has_the_rate_of_its_kind(dimensions, groups, transposed):
    """Those of a depthwise backward pass were measured over both gradients."""
    channels, extents = 8, (6,) * dimensions
    layer = CONVOLUTIONS[dimensions][transposed](channels, 2 * channels, 3, padding=1, groups=groups, bias=False)
    if transposed and groups == channels:
        layer = CONVOLUTIONS[dimensions][1](2 * channels, channels, 3, padding=1, groups=groups, bias=False)
    net = nn.Sequential(Scale(), layer)
    traced = trace(net, N, layer.in_channels, *extents).layers[1]
    passes = {kernel.op: kernel.parts for way in ("forward", "backward") for kernel in traced.kernels(way)}
    works = [
        next(part for part in passes[op] if part.kind not in {"transposes", "stream"})
        for op in ("convolution", "convolution_backward_data", "convolution_backward_weight")
    ]
    expected = ["convolution", "convolution", "weight_gradient"]
    if groups == channels:
        expected = ["depthwise", *["depthwise_backward"] * 2]
        expected = [expected[1], expected[0], expected[2]] if transposed else expected
        assert {part.units for part in works} == {2 * N * 6**dimensions * 2 * channels * 3**dimensions}
    assert [part.kind for part in works] == expected


def test_channels_of_a_convolution_fill_whole_tiles():
    convolution = nn.Conv2d(3, 70, 1, bias=False)
    forward, data = (parts(convolution, N, 3, 8, 8, direction=way)[0] for way in ("forward", "backward"))
    assert (forward.units, data.units) == (2 * N * 64 * 16 * 128, 2 * N * 64 * 80 * 64)


def test_rows_of_a_product_that_no_fast_kernel_reads():
    assert kinds(nn.Linear(C, 57, bias=False), N, C, dtype=torch.bfloat16) == ["product_unaligned"]
    assert kinds(nn.Linear(C, 56, bias=False), N, C, dtype=torch.bfloat16) == ["product"]


def test_many_small_products_compute_whole_tiles():
    (part,) = parts(lambda x: x @ x.transpose(1, 2), N, 80, C)
    assert part.units == N * 2 * 128 * 128 * C


def test_what_is_added_to_a_parameter_is_told():
    assert kinds(nn.Linear(C, C), N, C, direction="backward").count(ACCUMULATE) == 2


def test_gradients_are_dense_where_an_output_is_not():
    """So the sum of two, and the copy before a product, take no transposition."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(C), nn.Linear(C, C)

        def forward(self, x):
            return x + self.linear(self.norm(x))

    net = nn.Sequential(Of(lambda x: x.transpose(1, 2)), Residual(), Residual())
    found = [part.kind for kernel in trace(net, N, C, S).layers[2].kernels("backward") for part in kernel.parts]
    # The only one is the input of the norm.
    assert found.count("transposed") == 1
    assert found.count("stream") == 1
