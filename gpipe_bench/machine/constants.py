"""What a GPU does in a second, kind of kernel by kind: the section ``kernels`` of a profile.

    t = start + max(bytes / (share of the bandwidth), FLOPs / (share of the peak), elements / rate)

Each constant follows from cases that are measured apart, in a second, on any GPU. See
:mod:`gpipe_bench.kernels.law` for how they are put together.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from gpipe_bench.util.nearest import nearest

Unit = Literal["us", "ns", "share", "G/s", "count", "times"]


class Fact(NamedTuple):
    """What a constant is: its unit, what it says, and the case that measures it."""

    unit: Unit
    text: str
    case: str


CONSTANTS: Final[Mapping[str, Fact]] = {
    "launch_us": Fact("us", "host time of an operation", "steps of a tiny network and of a tiny transformer"),
    "lock": Fact("times", "of it where several threads launch, which take turns", "1, 2 and 4 threads that launch"),
    "parameter_us": Fact("us", "of a parameter in an update; its device waits, too", "updates of 400 parameters"),
    "start_us": Fact("us", "start of a kernel and the gap after it", "200 kernels of 1000 elements"),
    "library_start_us": Fact("us", "start of a product, convolution or column sum", "3x3 convolution, 8x8"),
    "multiprocessors": Fact("count", "multiprocessors", "the driver"),
    "memory": Fact("share", "of the bandwidth: tensors that are laid out alike", "leaky_relu of 150 MB"),
    "strided": Fact("G/s", "elements: operands that are expanded or cut out", "x * y[:, :, None, None]"),
    "transposed": Fact("G/s", "elements: operands with other neighbours in memory", "x + y.transpose(1, 2)"),
    "heavy": Fact("G/s", "elements: GELU, softmax, dropout and the like", "GELU in bfloat16"),
    "avg_pool": Fact("G/s", "outputs", "average pool, 3x3, stride 1"),
    "avg_pool_backward": Fact("G/s", "inputs, times 4 and the windows of an input", "the same, backward"),
    "max_pool": Fact("G/s", "outputs", "max pool, 2x2"),
    "max_pool_backward": Fact("G/s", "inputs", "the same, backward"),
    "norm": Fact("G/s", "elements for each channel, by PyTorch", "batch norm of 64 channels in bfloat16"),
    "cudnn_norm": Fact("G/s", "elements for each channel, by cuDNN", "batch norm of 64 channels in float32"),
    "norm_backward": Fact("G/s", "elements for each channel", "the same, backward"),
    "plane_ns": Fact("ns", "each channel, or plane of an instance norm", "instance norm of 6x6 planes"),
    "layer_norm": Fact("G/s", "elements", "layer norm of rows of 1024"),
    "layer_norm_backward": Fact("G/s", "elements", "the same, backward"),
    "column_sum": Fact("G/s", "elements, in matrices of 512 columns or more", "sum over 32768 rows of 3072"),
    "product_float32": Fact("share", "of the peak", "8192x1280 by 1280x5120 in float32"),
    "product_half": Fact("share", "of the peak", "the same in bfloat16"),
    "product_unaligned": Fact("share", "of the peak: rows of no multiple of 16 bytes", "8192x768 by 768x50257"),
    "attention_float32": Fact("share", "of the peak, where a mask hides nothing", "causal, dropout, T = 1024, d = 64"),
    "attention_half": Fact("share", "likewise", "the same in bfloat16"),
    "attention_backward_float32": Fact("share", "likewise", "the same, backward"),
    "attention_backward_half": Fact("share", "likewise", "the same, backward in bfloat16"),
    **{
        f"{kind}_no_dropout_{ending}_{length}": Fact("share", "likewise, without dropout", f"the same, T = {keys}")
        for kind in ("attention", "attention_backward")
        for ending in ("float32", "half")
        for length, keys in (("1k", 1024), ("8k", 8192))
    },
    "convolution_float32": Fact("share", "of the peak", "four convolutions, 3x3 and 1x1"),
    "convolution_half": Fact("share", "of the peak", "the same in bfloat16"),
    "weight_gradient_float32": Fact("share", "of the peak", "their gradients of the weights"),
    "weight_gradient_half": Fact("share", "of the peak", "the same in bfloat16"),
    "convolution_no_tf32": Fact("share", "of the peak of the ordinary units", "both sizes in float32 without TF32"),
    "transposes": Fact("G/s", "elements: channels that are not last", "all of these convolutions together"),
    "depthwise": Fact("share", "of the peak of the ordinary units", "7x7 depthwise convolution"),
    "depthwise_backward": Fact("share", "likewise, of both gradients", "the same, backward"),
}
"""The constants, by name."""

_OPTIONAL: Final = frozenset({"lock", "parameter_us"})
"""Without the former, threads of one process launch without regard to each other; without the latter it is 0."""

DIRECT_SHARE: Final = 1.0
"""Largest share of a peak: no device does more than its peak."""

FAST_SHARE: Final = 4.0
"""Largest share of convolutions that Winograd's algorithm may compute: of the direct algorithm's FLOPs, which are
counted, its usual tiles need a quarter."""


def largest(name: str) -> float:
    """The largest value that a constant may have."""
    if CONSTANTS[name].unit != "share":
        return inf
    return FAST_SHARE if name == "convolution_no_tf32" else DIRECT_SHARE


class Constant(BaseModel):
    """A constant of a device."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    value: float = Field(gt=0, description="in the unit of CONSTANTS")
    origin: Literal["measured", "fitted", "data sheet", "assumed"] = Field(
        description="measured: from times of single operators; fitted: whole steps, or printed rows, come out best so"
    )
    spread: float | None = Field(default=None, ge=0, description="of repeated measurements, as a share of the value")


def constant_problems(constants: Mapping[str, Constant]) -> list[str]:
    """What is wrong about the constants of a device, by their names."""
    missing = (name for name in CONSTANTS if name not in {*constants, *_OPTIONAL})
    problems = [f"kernels.{name} must be given, got nothing; add it" for name in missing]
    for name, constant in constants.items():
        if name not in CONSTANTS:
            hint = nearest(name, list(CONSTANTS))
            problems.append(f"kernels.{name} must be a constant of the law, got an unknown one; {hint}")
        elif constant.value > (most := largest(name)):
            problems.append(
                f"kernels.{name} must be at most {most:g}, got {constant.value:g}; write a share, not percent"
            )
    return problems
