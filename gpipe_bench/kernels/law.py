"""From the parts of a kernel to nanoseconds, by the constants that a profile has for its device.

    start + max(bytes / (share of the bandwidth), work)

where the work is FLOPs at a share of the peak, or elements at a rate of their kind. Batch norms give a block of threads
to each channel: they use two for each multiprocessor at most, and each block takes its time. Convolutions in float32
that may not use TF32 run on the ordinary units, with one share of their peak for all passes, and transpose nothing.

Attention without dropout has shares at 1024 and at 8192 keys. The time of a FLOP falls between them as 1/keys does: a
query costs something beside its keys, and a causal mask cuts tiles. Shorter and longer sequences take the nearer share.
"""

from __future__ import annotations

from typing import Final

from gpipe_bench.kernels.kernel import ACCUMULATE, Part
from gpipe_bench.machine.profile import Profile
from gpipe_bench.settings import HALVES

_STREAMS: Final = frozenset({"stream", ACCUMULATE})
_CONVOLUTIONS: Final = frozenset({"convolution", "weight_gradient"})
_ATTENTIONS: Final = frozenset({"attention", "attention_backward"})
_NO_DROPOUT: Final = frozenset(f"{kind}_no_dropout" for kind in _ATTENTIONS)
_PRODUCTS: Final = frozenset({"product", "product_unaligned"})
_DEPTHWISE: Final = frozenset({"depthwise", "depthwise_backward"})
_NORMS: Final = frozenset({"norm", "cudnn_norm", "norm_backward"})
_LIBRARY: Final = _CONVOLUTIONS | _PRODUCTS | {"transposes", "column_sum"}
_BLOCKS: Final = 2
# Keys of the two lengths of attention.
_SHORT: Final = 1024
_LONG: Final = 8192


def part_ns(part: Part, dtype: str, profile: Profile) -> float:
    """Device time of a part of a kernel with results of type ``dtype``."""
    constants = profile.constants
    if part.kind == "transposes" and not _on_matrix_units(dtype, profile):
        return 0
    start = "library_start_us" if part.kind in _LIBRARY else "start_us"
    # 10^9 bytes or elements per second are one per nanosecond.
    memory_ns = part.bytes / (constants["memory"] * profile.bandwidth_gb_per_s)
    return 1000 * constants[start] + max(memory_ns, _work_ns(part, dtype, profile))


def _work_ns(part: Part, dtype: str, profile: Profile) -> float:
    kind, constants = part.kind, profile.constants
    if kind in _STREAMS:
        return 0
    if kind in _NORMS:
        side_by_side = min(part.blocks, _BLOCKS * constants["multiprocessors"])
        return part.units / (constants[kind] * side_by_side) + part.blocks * constants["plane_ns"]
    if kind in _DEPTHWISE:
        return 1e9 * part.units / (constants[kind] * profile.peak_tflops["float32"] * 1e12)
    if kind not in _CONVOLUTIONS | _ATTENTIONS | _NO_DROPOUT | _PRODUCTS:
        return part.units / constants[kind]
    name = f"{kind}_{'half' if dtype in HALVES else 'float32'}"
    if kind == "product_unaligned":
        name = kind if dtype in HALVES else "product_float32"
    if kind in _CONVOLUTIONS and not _on_matrix_units(dtype, profile):
        name = "convolution_no_tf32"
    peak = profile.peak_flop_per_s("convolution" if kind in _CONVOLUTIONS else "matmul", dtype)
    if kind in _NO_DROPOUT:
        short, long = (1 / constants[f"{name}_{length}"] for length in ("1k", "8k"))
        near = (_SHORT / min(max(part.blocks, _SHORT), _LONG) - _SHORT / _LONG) / (1 - _SHORT / _LONG)
        return 1e9 * part.units * (long + (short - long) * near) / peak
    return 1e9 * part.units / (constants[name] * peak)


def _on_matrix_units(dtype: str, profile: Profile) -> bool:
    """Whether convolutions run on matrix units; without TF32 those in float32 do not."""
    return dtype in HALVES or "tensorfloat32" in profile.matrix_tflops
