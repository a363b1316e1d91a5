"""From kernels to nanoseconds: by the law of a profile's constants, or a roofline with one efficiency per kernel class.

    computing kernels     max(FLOPs / (efficiency x peak), bytes / (efficiency of memory x bandwidth))
    memory-bound kernels  bytes / (efficiency of memory x bandwidth)
    Winograd              transform of operands and filters, products, transform of the result: three after the other;
                          scratch memory is written and read by different ones

and none is shorter than the kernel floor. So a 3x3 convolution of few channels and large planes, which has few products
per byte, is slower than its FLOPs say. Each kernel is rounded to whole nanoseconds, so that sums are exact.
"""

from __future__ import annotations

from gpipe_bench.kernels.kernel import Kernel
from gpipe_bench.kernels.law import part_ns
from gpipe_bench.machine.profile import Profile


def duration_ns(kernel: Kernel, profile: Profile) -> int:
    """Device time of one kernel: as measured, or of its parts where the profile has constants for kinds of kernels."""
    if kernel.own_ns is not None:
        return kernel.own_ns
    if profile.kernels is not None and kernel.parts is not None:
        return round(sum(part_ns(part, kernel.dtype, profile) for part in kernel.parts))
    efficiency = profile.efficiency
    moved = kernel.bytes_read + kernel.bytes_written
    # 10^9 bytes per second is one byte per nanosecond.
    memory_ns = moved / (efficiency.memory_bound * profile.bandwidth_gb_per_s)
    floor_ns = kernel.launches * profile.kernel_floor_us * 1000
    if kernel.kernel_class == "memory_bound":
        return round(max(memory_ns, floor_ns))
    compute_ns = 1e9 * kernel.flop / profile.flop_per_s(kernel.kernel_class, kernel.arithmetic, kernel.dtype)
    if kernel.workspace and profile.uses_winograd(kernel.dtype):
        scratch_ns = kernel.workspace / (efficiency.memory_bound * profile.bandwidth_gb_per_s)
        return round(max(memory_ns + scratch_ns + max(compute_ns, scratch_ns), floor_ns))
    return round(max(compute_ns, memory_ns, floor_ns))


def scratch_bytes(kernel: Kernel, profile: Profile) -> int:
    """Scratch memory that a kernel asks for."""
    return kernel.workspace if kernel.workspace and profile.uses_winograd(kernel.dtype) else 0


def workspace_bytes(kernel: Kernel, profile: Profile) -> int:
    """What PyTorch allocates for the handle of cuBLAS that runs a kernel, once; 0 for kernels of others."""
    return round(profile.cublas_workspace_mib * 2**20) if kernel.arithmetic == "matmul" else 0
