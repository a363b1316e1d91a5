"""The kernels of a device profile: shapes of the benchmarked models, in three classes.

A cost model needs one efficiency per class, since the classes are bound by different things:

    conv3x3_stride1    most of U-Net; fast algorithms (Winograd) may do with fewer operations than are counted
    other_conv_matmul  1x1, 1x7, strided convolutions (most of AmoebaNet) and matrix products
    memory_bound       activation, normalisation, pooling, concatenation: bound by bytes

Operations are counted as 2 per multiply-add of the direct algorithm; bytes as each operand read once and each result
written once. So both rates are *achieved* ones, and none is a peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

KERNEL_CLASSES: Final = ("conv3x3_stride1", "other_conv_matmul", "memory_bound")

Run = Callable[[], object]

# (in channels, out channels, image size, (kernel height, kernel width), stride), for micro-batches of 16 samples:
# U-Net (5, 64) at 192x192, levels 0, 2 and 4; then AmoebaNet-D (18, 256) at 224x224 and the stem of both.
_CONVOLUTIONS: Final = (
    (64, 64, 192, (3, 3), 1),
    (256, 256, 48, (3, 3), 1),
    (1024, 1024, 12, (3, 3), 1),
    (3, 64, 224, (3, 3), 2),
    (512, 512, 28, (1, 1), 1),
    (128, 128, 28, (1, 7), 1),
)
_MATRIX: Final = 4096
_CHANNELS: Final = 64
_SIZE: Final = 192
_BATCH: Final = 16
# A CPU gets one sample, an eighth of the matrix and a quarter of the image: milliseconds per call there too. What is
# bound by memory keeps the image, or it would run in the caches.
_CPU_BATCH: Final = 1
_CPU_MATRIX: Final = 512
_CPU_SHRINK: Final = 4
_CPU_MEMORY_BATCH: Final = 2


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel at one size.

    Attributes:
        kernel_class: one of :data:`KERNEL_CLASSES`.
        name: operation and shape.
        direction: ``forward``, or ``backward`` for the gradients of data and weights together.
        flop: operations of one call.
        nbytes: bytes of one call, operands and results.
        prepare: allocates the operands and returns what runs one call; nothing is held before.
    """

    kernel_class: str
    name: str
    direction: str
    flop: int
    nbytes: int
    prepare: Callable[[], Run]


def kernel_cases(device: torch.device) -> Iterator[KernelCase]:
    """Every case of ``device``, in float32; a CPU gets smaller shapes."""
    small = device.type == "cpu"
    batch, shrink = (_CPU_BATCH, _CPU_SHRINK) if small else (_BATCH, 1)
    for channels, out_channels, size, kernel, stride in _CONVOLUTIONS:
        yield from _convolution(device, (batch, channels, size // shrink), out_channels, kernel, stride)
    yield from _product(device, _CPU_MATRIX if small else _MATRIX)
    yield from _memory_bound(device, (_CPU_MEMORY_BATCH if small else _BATCH, _CHANNELS, _SIZE, _SIZE))


def _convolution(
    device: torch.device, shape: tuple[int, int, int], out_channels: int, kernel: tuple[int, int], stride: int
) -> Iterator[KernelCase]:
    batch, channels, size = shape
    padding = (kernel[0] // 2, kernel[1] // 2)
    out_size = (size - 1) // stride + 1
    weights = out_channels * channels * kernel[0] * kernel[1]
    inputs, outputs = batch * channels * size**2, batch * out_channels * out_size**2
    flop = 2 * batch * out_size**2 * weights
    kernel_class = KERNEL_CLASSES[0 if kernel == (3, 3) and stride == 1 else 1]
    name = f"conv2d {kernel[0]}x{kernel[1]} stride {stride}: {batch}x{channels}x{size}x{size} to {out_channels}"

    def operands() -> list[Tensor]:
        return [
            torch.randn(batch, channels, size, size, device=device),
            torch.randn(out_channels, channels, *kernel, device=device),
        ]

    def convolve(data: Tensor, weight: Tensor) -> Tensor:
        return functional.conv2d(data, weight, stride=stride, padding=padding)

    nbytes = 4 * (inputs + weights + outputs)
    yield KernelCase(kernel_class, name, "forward", flop, nbytes, lambda: _forward(convolve, operands()))
    # Each of the two gradients reads the output's gradient and the other operand, and writes its own.
    both = 4 * (2 * outputs + 2 * weights + 2 * inputs)
    yield KernelCase(kernel_class, name, "backward", 2 * flop, both, lambda: _backward(convolve, operands()))


def _product(device: torch.device, size: int) -> Iterator[KernelCase]:
    def operands() -> list[Tensor]:
        return [torch.randn(size, size, device=device) for _ in range(2)]

    name, flop, nbytes = f"matmul {size}x{size} by {size}x{size}", 2 * size**3, 4 * 3 * size**2
    yield KernelCase(KERNEL_CLASSES[1], name, "forward", flop, nbytes, lambda: _forward(torch.matmul, operands()))
    yield KernelCase(
        KERNEL_CLASSES[1], name, "backward", 2 * flop, 2 * nbytes, lambda: _backward(torch.matmul, operands())
    )


def _memory_bound(device: torch.device, shape: tuple[int, int, int, int]) -> Iterator[KernelCase]:
    elements = shape[0] * shape[1] * shape[2] * shape[3]
    dimensions = "x".join(map(str, shape))

    # (operation, its name, reads and writes in numbers of elements)
    operations: tuple[tuple[Callable[[Tensor], Tensor], str, float], ...] = (
        (functional.leaky_relu, "leaky_relu", 2),
        (functional.instance_norm, "instance_norm", 2),
        (lambda data: functional.max_pool2d(data, 2), "max_pool2d 2x2", 1.75),  # with 8-byte indices of the maxima
        (lambda data: functional.interpolate(data, scale_factor=2), "upsample nearest x2", 5),
        (lambda data: torch.cat((data, data), dim=1), "cat of two", 4),
        (lambda data: data + data, "add", 3),
    )
    for operation, label, traffic in operations:
        # Bound here, not in the loop's scope, where the last operation would stand for all.
        def prepare(operation: Callable[[Tensor], Tensor] = operation) -> Run:
            return _forward(operation, [torch.randn(shape, device=device)])

        nbytes = round(4 * elements * traffic)
        yield KernelCase(KERNEL_CLASSES[2], f"{label}: {dimensions}", "forward", 0, nbytes, prepare)


def _forward(operation: Callable[..., Tensor], operands: list[Tensor]) -> Run:
    def run() -> Tensor:
        with torch.no_grad():
            return operation(*operands)

    return run


def _backward(operation: Callable[..., Tensor], operands: list[Tensor]) -> Run:
    with torch.enable_grad():
        leaves = [operand.requires_grad_() for operand in operands]
        output = operation(*leaves)
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)
