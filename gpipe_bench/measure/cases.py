"""The cases that tell what a device does in a second: small programs, each bound by one kind of kernel.

Sizes are those of the models of the suite, in the type in which the kind's own rate shows: in bfloat16 where float32
would be bound by bytes, or in float16 on GPUs that have no bfloat16. A CPU rehearses with a small part of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

Run = Callable[[], object]

_HALF: Final = torch.bfloat16
_LAUNCHES: Final = 200


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a case runs, and how large it is.

    Attributes:
        device: of all tensors; on ``meta`` a case can be traced.
        shrink: its extents are divided by so much.
        half: the type of tensors that are in bfloat16 by default; float16 where the device is too old for that.
    """

    device: torch.device
    shrink: int = 1
    half: torch.dtype = _HALF

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of random numbers."""
        return torch.randn(*shape, device=self.device).to(self.half if dtype == _HALF else dtype)

    def part(self, extent: int) -> int:
        """An extent that may shrink."""
        return max(1, extent // self.shrink)


@dataclass(frozen=True, slots=True)
class Case:
    """A small program.

    Attributes:
        name: what it is.
        constants: the constants of a profile that it tells, by their names.
        prepare: allocates the operands, and gives what runs it once; nothing is held before.
        tf32: whether its convolutions may use TF32, as by PyTorch's defaults.
    """

    name: str
    constants: tuple[str, ...]
    prepare: Callable[[Bench], Run]
    tf32: bool = True


def _forward(function: Callable[..., Tensor], operands: Callable[[Bench], Sequence[Tensor]]) -> Callable[[Bench], Run]:
    def prepare(bench: Bench) -> Run:
        held = operands(bench)

        def run() -> Tensor:
            with torch.no_grad():
                return function(*held)

        return run

    return prepare


def _backward(
    function: Callable[..., Tensor], operands: Callable[[Bench], Sequence[Tensor]], wanted: Sequence[int] = (0,)
) -> Callable[[Bench], Run]:
    """The gradients of some operands, by their places."""

    def prepare(bench: Bench) -> Run:
        with torch.enable_grad():
            held = [tensor.requires_grad_(place in wanted) for place, tensor in enumerate(operands(bench))]
            output = function(*held)
            gradient = torch.ones_like(output)
        leaves = [held[place] for place in wanted]
        return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)

    return prepare


def _many_tiny(bench: Bench) -> Run:
    tiny = bench.tensor(1000)

    def run() -> None:
        for _ in range(_LAUNCHES):
            tiny.add_(1.0)

    return run


def _planes(
    channels: int, size: int, dtype: torch.dtype = torch.float32, batch: int = 16
) -> Callable[[Bench], list[Tensor]]:
    return lambda bench: [bench.tensor(bench.part(batch), channels, size, size, dtype=dtype)]


def _rows(rows: int, columns: int) -> Callable[[Bench], list[Tensor]]:
    return lambda bench: [bench.tensor(bench.part(rows), columns, dtype=_HALF)]


def _matrices(rows: int, inner: int, columns: int, dtype: torch.dtype) -> Callable[[Bench], list[Tensor]]:
    return lambda bench: [
        bench.tensor(bench.part(rows), inner, dtype=dtype),
        bench.tensor(inner, bench.part(columns), dtype=dtype),
    ]


def _heads(length: int, dtype: torch.dtype) -> Callable[[Bench], list[Tensor]]:
    def operands(bench: Bench) -> list[Tensor]:
        shape = bench.part(8192 // length), 12, bench.part(length), 64
        return [bench.tensor(*shape, dtype=dtype) for _ in range(3)]

    return operands


def _filtered(channels: int, size: int, edge: int, dtype: torch.dtype) -> Callable[[Bench], list[Tensor]]:
    def operands(bench: Bench) -> list[Tensor]:
        image = bench.part(size)
        filters = bench.tensor(channels, channels, edge, edge, dtype=dtype)
        return [bench.tensor(bench.part(16), channels, image, image, dtype=dtype), filters]

    return operands


def _depthwise_operands(bench: Bench) -> list[Tensor]:
    image = bench.tensor(bench.part(64), 96, 56, 56).to(memory_format=torch.channels_last)
    return [image, bench.tensor(96, 1, 7, 7)]


def _convolve(data: Tensor, weight: Tensor) -> Tensor:
    return functional.conv2d(data, weight, padding=weight.shape[-1] // 2)


def _convolve_depthwise(data: Tensor, weight: Tensor) -> Tensor:
    return functional.conv2d(data, weight, padding=weight.shape[-1] // 2, groups=data.shape[1])


def _norm(data: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return functional.batch_norm(data, None, None, scale, shift, training=True)


def _with_weights(operands: Callable[[Bench], list[Tensor]]) -> Callable[[Bench], list[Tensor]]:
    def more(bench: Bench) -> list[Tensor]:
        (data,) = operands(bench)
        return [data, *(bench.tensor(data.shape[1], dtype=data.dtype) for _ in range(2))]

    return more


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _attend_and_drop(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.1)


def _layer_norm(data: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return functional.layer_norm(data, data.shape[1:], scale, shift)


def _average(data: Tensor) -> Tensor:
    return functional.avg_pool2d(data, 3, stride=1, padding=1)


def _maximum(data: Tensor) -> Tensor:
    return functional.max_pool2d(data, 2)


def _pair(
    text: str, told: tuple[str, str], function: Any, operands: Any, *, wanted: Sequence[int] = (0,)
) -> tuple[Case, Case]:
    forward = Case(text, told[:1], _forward(function, operands))
    return forward, Case(f"{text}, backward", told[1:], _backward(function, operands, wanted))


def _by_bytes_or_elements() -> Iterator[Case]:
    yield Case(f"{_LAUNCHES} additions to 1000 elements", ("start_us",), _many_tiny)
    yield Case("leaky_relu of 150 MB", ("memory",), _forward(functional.leaky_relu, _planes(64, 192)))

    def expanded(bench: Bench) -> list[Tensor]:
        samples = bench.part(64)
        return [bench.tensor(samples, 256, 64, 64, dtype=_HALF), bench.tensor(samples, 256, dtype=_HALF)]

    def squares(bench: Bench) -> list[Tensor]:
        return [bench.tensor(bench.part(64), bench.part(1024), bench.part(1024), dtype=_HALF) for _ in range(2)]

    yield Case("x * y[:, :, None, None]", ("strided",), _forward(lambda x, y: x * y[:, :, None, None], expanded))
    yield Case("x + y.transpose(1, 2)", ("transposed",), _forward(lambda x, y: x + y.transpose(1, 2), squares))
    yield Case("GELU in bfloat16", ("heavy",), _forward(functional.gelu, _planes(64, 192, _HALF)))
    small = _forward(functional.instance_norm, _planes(512, 6, batch=64))
    yield Case("instance norm of 6x6 planes", ("plane_ns",), small)
    halves = _forward(_norm, _with_weights(_planes(64, 192, _HALF)))
    yield Case("batch norm of 64 channels in bfloat16", ("norm",), halves)
    yield Case("sum over 32768 rows of 3072", ("column_sum",), _forward(lambda x: x.sum(0), _rows(32768, 3072)))
    yield from _pair("average pool 3x3", ("avg_pool", "avg_pool_backward"), _average, _planes(64, 96))
    yield from _pair("max pool 2x2", ("max_pool", "max_pool_backward"), _maximum, _planes(64, 192))
    norms, planes = ("cudnn_norm", "norm_backward"), _with_weights(_planes(64, 192))
    yield from _pair("batch norm of 64 channels", norms, _norm, planes, wanted=(0, 1, 2))
    layers, rows = ("layer_norm", "layer_norm_backward"), _with_weights(_rows(65536, 1024))
    yield from _pair("layer norm of rows of 1024", layers, _layer_norm, rows, wanted=(0, 1, 2))


def _by_products() -> Iterator[Case]:
    both = "depthwise", "depthwise_backward"
    yield from _pair("depthwise 7x7", both, _convolve_depthwise, _depthwise_operands, wanted=(0, 1))
    for dtype, ending in ((torch.float32, "float32"), (_HALF, "half")):
        text = str(dtype).removeprefix("torch.")
        attention = f"attention_{ending}", f"attention_backward_{ending}"
        name = f"attention, causal, {text}"
        yield from _pair(f"{name}, dropout", attention, _attend_and_drop, _heads(1024, dtype), wanted=(0, 1, 2))
        for length, keys in (("1k", 1024), ("8k", 8192)):
            attention = f"attention_no_dropout_{ending}_{length}", f"attention_backward_no_dropout_{ending}_{length}"
            yield from _pair(f"{name}, {keys} tokens", attention, _attend, _heads(keys, dtype), wanted=(0, 1, 2))
        product = _forward(torch.matmul, _matrices(8192, 1280, 5120, dtype))
        yield Case(f"8192x1280 by 1280x5120, {text}", (f"product_{ending}",), product)
        for channels, size, edge in ((256, 48, 3), (64, 192, 3), (512, 24, 3), (512, 28, 1)):
            name = f"{edge}x{edge} convolution of {channels} channels, {size}x{size}, {text}"
            operands = _filtered(channels, size, edge, dtype)
            yield Case(name, (f"convolution_{ending}", "transposes"), _forward(_convolve, operands))
            gradient = _backward(_convolve, operands, (1,))
            yield Case(f"{name}, weight gradient", (f"weight_gradient_{ending}", "transposes"), gradient)
    for channels, size in ((256, 48), (64, 192)):
        name, told = f"3x3 convolution of {channels} channels without TF32", ("convolution_no_tf32",)
        operands = _filtered(channels, size, 3, torch.float32)
        yield Case(name, told, _forward(_convolve, operands), tf32=False)
        yield Case(f"{name}, backward", told, _backward(_convolve, operands, (0, 1)), tf32=False)
    unaligned = _forward(torch.matmul, _matrices(8192, 768, 50257, _HALF))
    yield Case("8192x768 by 768x50257, bfloat16", ("product_unaligned",), unaligned)

    def tiny(bench: Bench) -> list[Tensor]:
        return [bench.tensor(1, 64, 8, 8), bench.tensor(64, 64, 3, 3)]

    yield Case("3x3 convolution, 8x8", ("library_start_us",), _forward(_convolve, tiny))


CASES: Final[Sequence[Case]] = (*_by_bytes_or_elements(), *_by_products())
"""All of them; each constant of a kind of kernel is told by one or more."""


def peak_cases(bench: Bench) -> dict[str, tuple[int, Callable[[Bench], Run]]]:
    """Large products of each type, for a device whose peaks nobody knows: FLOPs, and what prepares it."""
    # Smaller ones spend their time on the way to the product.
    edge = max(256, bench.part(4096))

    def squares(dtype: torch.dtype) -> Callable[[Bench], list[Tensor]]:
        return lambda bench: [bench.tensor(edge, edge, dtype=dtype) for _ in range(2)]

    def channels_last(bench: Bench) -> list[Tensor]:
        operands = bench.tensor(1, edge, 64, 64), bench.tensor(edge, edge, 1, 1)
        return [operand.to(memory_format=torch.channels_last) for operand in operands]

    # Where halves are float16, it is there twice.
    types = (torch.float32, torch.float64, torch.float16, bench.half)
    products = {str(dtype).removeprefix("torch."): _forward(torch.matmul, squares(dtype)) for dtype in types}
    found = {name: (2 * edge**3, product) for name, product in products.items()}
    if bench.half == _HALF:  # GPUs that compute in bfloat16 have TF32, too
        # Convolutions in float32 may use it, and with their channels last one of 1x1 is a product.
        found["tensorfloat32"] = 2 * edge**2 * 64 * 64, _forward(_convolve, channels_last)
    return found
