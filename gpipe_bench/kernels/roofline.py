"""The law of profiles without constants (P40, P100, V100): an operation is one kernel, with the time of a roofline.

    computing kernels     max(FLOPs / (efficiency x peak), bytes / (efficiency of memory x bandwidth))
    memory-bound kernels  bytes / (efficiency of memory x bandwidth)
    Winograd              transform of operands and filters, products, transform of the result: three after the other;
                          scratch memory is written and read by different ones

and none is shorter than the kernel floor. So a 3x3 convolution of few channels and large planes, which has few products
per byte, is slower than its FLOPs say. FLOPs are those of the direct algorithm.
"""

from __future__ import annotations

from typing import Final

from gpipe_bench.kernels.call import Call, occupied
from gpipe_bench.kernels.kernel import Kernel, Whole
from gpipe_bench.machine.constants import DIRECT_SHARE
from gpipe_bench.machine.profile import Profile

# Name -> where the kernel size and the stride stand among the arguments.
_POOLS: Final = {
    "avg_pool2d": (1, 2),
    "avg_pool2d_backward": (2, 3),
    "max_pool2d_with_indices": (1, 2),
    "max_pool2d_with_indices_backward": (2, 3),
}
# Winograd's F(4x4, 3x3) turns each 4x4 tile of a plane into 6x6 numbers, and each 3x3 filter too (Lavin and Gray,
# arXiv 1509.09308); the non-fused form keeps all of them in scratch memory.
_TILE_GROWTH: Final = (36, 16)
_FILTER_GROWTH: Final = 36 // 9


def whole_of(call: Call) -> Whole:
    """An operation as this law sees it: its class, its bytes, its FLOPs and its scratch memory."""
    if call.moments:
        # The weight does not stay in a cache.
        read = sum(tensor.nbytes for tensor in call.operands) + (call.moments - 1) * call.operands[-1].nbytes
    elif call.name in _POOLS:
        # Windows that overlap read their rows again.
        kernel, stride = (call.args[place] if len(call.args) > place else [] for place in _POOLS[call.name])
        read = call.read * -(-int(kernel[0]) // int(stride[0] if stride else kernel[0]))
    else:
        read = call.read * call.launches
    kind, scratch, convolution = "memory_bound" if call.flop is None else "matmul", 0, call.convolution
    if convolution is not None:
        _, x, y, weight, stride, dilation, transposed, groups, _ = convolution
        # A filter of one point is a matrix product.
        kind = "spatial_conv" if any(edge > 1 for edge in weight.shape[2:]) else "other_conv_matmul"
        plain = not transposed and groups == 1 and {*stride, *dilation} == {1}
        if plain and tuple(weight.shape[2:]) == (3, 3):
            tiles = _TILE_GROWTH[0] * (occupied(x) + occupied(y)) // _TILE_GROWTH[1]
            kind, scratch = "conv3x3_stride1", tiles + _FILTER_GROWTH * occupied(weight)
    return Whole(kind, read, call.written, call.flop or 0, scratch)


def roofline_ns(kernel: Kernel, profile: Profile) -> float:
    """Device time of a kernel, not rounded."""
    whole, efficiency = kernel.whole, profile.efficiency
    # 10^9 bytes per second is one byte per nanosecond.
    bytes_per_ns = efficiency.memory_bound * profile.bandwidth_gb_per_s
    memory_ns = (whole.bytes_read + whole.bytes_written) / bytes_per_ns
    floor_ns = kernel.launches * profile.kernel_floor_us * 1000
    if whole.kind == "memory_bound":
        return max(memory_ns, floor_ns)
    share = getattr(efficiency, whole.kind) or efficiency.other_conv_matmul
    if whole.kind == "conv3x3_stride1" and profile.winograd != profile.uses_winograd(kernel.dtype):
        # The share says how fast Winograd's algorithm is; these units compute it as they do other wide filters.
        share = min(efficiency.spatial_conv or efficiency.other_conv_matmul, DIRECT_SHARE)
    peak = profile.peak_flop_per_s("matmul" if whole.kind == "matmul" else "convolution", kernel.dtype)
    compute_ns = 1e9 * whole.flop / (share * peak)
    scratch_ns = scratch_bytes(kernel, profile) / bytes_per_ns
    if scratch_ns:
        return max(memory_ns + scratch_ns + max(compute_ns, scratch_ns), floor_ns)
    return max(compute_ns, memory_ns, floor_ns)


def scratch_bytes(kernel: Kernel, profile: Profile) -> int:
    """Scratch memory that a kernel asks for: that of Winograd's algorithm, where the device uses it."""
    scratch = kernel.whole.scratch
    return scratch if scratch and profile.uses_winograd(kernel.dtype) else 0
