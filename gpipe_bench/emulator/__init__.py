"""Virtual devices for PyTorch: several accelerators, really run, on a machine that has none.

    load()                                  a device type ``virtual`` with eight devices, once per process
    load_shapes(4, profile)                 the same with devices that compute nothing, and kernels that have a duration
    with recording() as trace: step()       what ran when, on which device, stream and host thread
    with seen(): ...                        hand-overs between host threads are in the trace, too
    find_races(trace.records)               accesses that no wait orders, frees that no record_stream covers

The dispatcher, the autograd engine, streams, events and guards are PyTorch's own; only kernels are the CPU's, on host
memory, or none at all. They run when the host launches them, so results never depend on a missing wait: that is what
the race checker is for. (Refused: a worker thread per stream, which shows a missing wait only by luck; CUDA tensors
without data, on which a CPU build's autograd engine aborts; torch.utils.backend_registration alone, which knows one
device.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_bench.util.lazy import lazy

if TYPE_CHECKING:
    from gpipe_bench.emulator.api import emulate, prepare

__all__ = ["emulate", "prepare"]

# Loaded when first used: the emulator needs PyTorch.
_LAZY = dict.fromkeys(__all__, "gpipe_bench.emulator.api")

__getattr__, __dir__ = lazy(__name__, _LAZY, __all__)
