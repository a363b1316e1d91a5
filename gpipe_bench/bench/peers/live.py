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
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

# PyTorch has no public way to switch a mode on in one call and off in another; see gpipe_bench.measure.live_bytes.
from torch.utils._python_dispatch import TorchDispatchMode, _push_mode
from torch.utils._pytree import tree_leaves

from gpipe_bench.measure.ledger import Ledger
from gpipe_bench.measure.memory import has_memory_statistics, peak_memory, reset_peak_memory

__all__ = ["AllocatorPeak", "LiveBytesOfAll", "Peak", "peak_counter"]


class Peak(Protocol):
    """Counts from its making on."""

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made before."""

    def peak_bytes(self) -> int:
        """The most bytes alive at once so far."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves these two untyped
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._ledger = ledger

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, imports torch.compile's machinery only to keep it away from this mode.
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        self._ledger.enter((leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)), 0)
        return results


class LiveBytesOfAll:
    """Counts from now on in this thread and in those that start from now on; for the rest of the process."""

    def __init__(self) -> None:
        self._ledger = Ledger(1)
        threading.setprofile(self._start)
        self._push()

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made before."""
        self._ledger.enter(tensors, 0)

    def peak_bytes(self) -> int:
        """The most bytes alive at once so far."""
        return self._ledger.peak_total_bytes

    def _start(self, frame: FrameType, event: str, argument: Any) -> None:  # noqa: ARG002 - what Python calls
        """Called by a new thread at its first function call, and never again."""
        sys.setprofile(None)
        self._push()

    def _push(self) -> None:
        _push_mode(_Watch(self._ledger))


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


def peak_counter(devices: Sequence[str]) -> Peak:
    """The counter for work on ``devices``; make it before the model, in the thread that will run the steps."""
    if all(has_memory_statistics(device) for device in devices):
        torch.accelerator.synchronize(devices[0])
        return AllocatorPeak(devices)
    return LiveBytesOfAll()
