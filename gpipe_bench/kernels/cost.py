"""What a kernel costs on a device: its time, its scratch memory and its workspace.

Its time is that of its parts where the profile has constants for kinds of kernels (:mod:`.law`), and else a roofline
(:mod:`.roofline`). Each kernel is rounded to whole nanoseconds, so that sums are exact.
"""

from __future__ import annotations

from gpipe_bench.kernels.kernel import Kernel
from gpipe_bench.kernels.law import part_ns
from gpipe_bench.kernels.roofline import roofline_ns, scratch_bytes
from gpipe_bench.machine.profile import Profile

__all__ = ["duration_ns", "scratch_bytes", "workspace_bytes"]


def duration_ns(kernel: Kernel, profile: Profile) -> int:
    """Device time of one kernel."""
    if kernel.own_ns is not None:
        return kernel.own_ns
    if profile.kernels is None or kernel.parts is None:
        return round(roofline_ns(kernel, profile))
    return round(sum(part_ns(part, kernel.dtype, profile) for part in kernel.parts))


def workspace_bytes(kernel: Kernel, profile: Profile) -> int:
    """What PyTorch allocates for the handle of cuBLAS that runs a kernel, once; 0 for kernels of others."""
    return round(profile.cublas_workspace_mib * 2**20) if kernel.whole.kind == "matmul" else 0
