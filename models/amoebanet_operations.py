"""The operations that AmoebaNet's genotypes name (Real et al., arXiv 1802.01548), each from c to c channels.

Every convolution is ReLU, convolution without bias, batch norm. Bottlenecked ones work on c/4 channels inside.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FactorizedReduction(nn.Module):
    """Halves height and width by two 1x1 convolutions of stride 2, the second on the image shifted by (1, 1).

    Args:
        before: input channels.
        after: output channels, even.
    """

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(before, after // 2, kernel_size=1, stride=2, bias=False)
        self.offset_conv = nn.Conv2d(before, after // 2, kernel_size=1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, before, H, W), H and W even, to (N, after, H/2, W/2)."""
        x = self.relu(x)
        halves = torch.cat([self.conv(x), self.offset_conv(x[:, :, 1:, 1:])], dim=1)
        normed: Tensor = self.norm(halves)
        return normed


def relu_conv_norm(
    before: int,
    after: int,
    kernel: int | tuple[int, int] = 1,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
) -> nn.Sequential:
    """What every convolution of the model is: ReLU, convolution without bias, batch norm."""
    conv = nn.Conv2d(before, after, kernel, stride=stride, padding=padding, bias=False)
    return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(after))


def operation(name: str, channels: int, stride: int, *, max3_is_average: bool) -> nn.Module:
    """The operation of that name, from (N, channels, H, W) to (N, channels, H / stride, W / stride).

    Args:
        name: as in a genotype.
        channels: of input and output; a multiple of 4.
        stride: 1 or 2.
        max3_is_average: whether ``max3`` takes the average, padding not counted, as in the published runs.
    """
    bodies = {
        "none": _none,
        "avg3": _average,
        "max3": _average if max3_is_average else _max3,
        "max2": _max2,
        "1x1": _conv_1x1,
        "3x3": _conv_3x3,
        "1x7_7x1": _conv_1x7_7x1,
    }
    return bodies[name](channels, stride)


def _none(c: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorizedReduction(c, c)


def _average(_c: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False)


def _max3(_c: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride=stride, padding=1)


def _max2(_c: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride=stride)


def _conv_1x1(c: int, stride: int) -> nn.Module:
    return relu_conv_norm(c, c, stride=stride)


def _conv_3x3(c: int, stride: int) -> nn.Module:
    return nn.Sequential(
        relu_conv_norm(c, c // 4),
        relu_conv_norm(c // 4, c // 4, 3, stride, 1),
        relu_conv_norm(c // 4, c),
    )


def _conv_1x7_7x1(c: int, stride: int) -> nn.Module:
    return nn.Sequential(
        relu_conv_norm(c, c // 4),
        relu_conv_norm(c // 4, c // 4, (1, 7), (1, stride), (0, 3)),
        relu_conv_norm(c // 4, c // 4, (7, 1), (stride, 1), (3, 0)),
        relu_conv_norm(c // 4, c),
    )
