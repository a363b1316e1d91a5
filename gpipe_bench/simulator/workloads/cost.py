"""What kernels cost that run one after the other."""

from __future__ import annotations

from collections.abc import Iterable

from gpipe_bench.kernels.cost import duration_ns
from gpipe_bench.kernels.kernel import Kernel
from gpipe_bench.machine.profile import Profile
from gpipe_bench.simulator.workloads.workload import Kernels


def total(kernels: Iterable[Kernel], profile: Profile) -> Kernels:
    """Kernels that run one after the other; see :func:`gpipe_bench.kernels.cost.duration_ns`."""
    duration = launches = adding_ns = adding_launches = 0
    ends: list[int] = []
    for kernel in kernels:
        own = duration_ns(kernel, profile)
        ends += (duration + own * (k + 1) // kernel.launches for k in range(kernel.launches))
        duration += own
        launches += kernel.launches
        if kernel.adds:
            adding_ns += own
            adding_launches += kernel.launches
    return Kernels(duration, launches, adding_ns, adding_launches, ends_ns=tuple(ends))
