"""Peak of live tensor bytes, counted for every contender in the same way: below autograd, in all threads of a process.

Contenders start threads as they please, and PyTorch's own memory profile ends at the border of a thread. Here each
Python thread that starts while :class:`LiveBytesOfAll` is open shows its tensor operations to one ledger, through the
hook that Python has for profilers, so that nothing of a contender is replaced. What an operation returns is alive until
its storage is freed. Workspaces inside kernels are not seen. It slows every operation down: nothing is timed under it.

On accelerators the allocator counts by itself; there :class:`AllocatorPeak` asks it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gpipe_bench.measure.ledger import Ledger
from gpipe_bench.measure.memory import has_memory_statistics, peak_memory, reset_peak_memory
from gpipe_bench.measure.watch import switch_on


class LiveBytesOfAll:
    """Counts from now on in this thread and in those that start from now on; for the rest of the process."""

    def __init__(self) -> None:
        self._ledger = Ledger(1)
        threading.setprofile(self._start)
        switch_on(self)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made before."""
        self._ledger.enter(tensors, 0)

    def account(self, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:  # noqa: ARG002 - an accountant's
        """Count what an operation gave."""
        self._ledger.enter(results, 0)

    def peak_bytes(self) -> int:
        """The most bytes alive at once so far."""
        return self._ledger.peak_total_bytes

    def _start(self, frame: FrameType, event: str, argument: Any) -> None:  # noqa: ARG002 - what Python calls
        """Called by a new thread at its first function call, and never again."""
        sys.setprofile(None)
        switch_on(self)


class AllocatorPeak:
    """The sum over devices of the peaks of their allocators.

    Args:
        devices: accelerators.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = list(dict.fromkeys(devices))
        reset_peak_memory(self._devices)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Nothing to do: the allocator knows them."""

    def peak_bytes(self) -> int:
        """The most bytes allocated so far."""
        return sum(peak.allocated_bytes for peak in peak_memory(self._devices))


Peak = LiveBytesOfAll | AllocatorPeak
"""Counts from its making on."""


def peak_counter(devices: Sequence[str]) -> Peak:
    """The counter for work on ``devices``; make it before the model, in the thread that will run the steps."""
    if all(has_memory_statistics(device) for device in devices):
        torch.accelerator.synchronize(devices[0])
        return AllocatorPeak(devices)
    return LiveBytesOfAll()
