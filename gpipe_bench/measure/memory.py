"""Peaks of memory: from the allocator of an accelerator, or by counting live tensors on the CPU.

:class:`LiveBytes` sees every tensor operation below autograd. What it allocates counts to the partition whose task runs
in that thread; in a backward pass without checkpoint to the partition that the autograd node belongs to; outside tasks
(gather, loss, optimizer) to the owner of its first counted operand:

    main thread       with LiveBytes(pipe): mode on ── loss, backward: recompute, nested backward, gradients ── off
    worker of j       start(F(i,j)): mode on ── operations of partition j ── finish: mode off

Autograd runs a node under the modes of the thread that called ``backward``, so the mode that is on there covers the
whole backward pass, while a mode switched on inside a node would be gone with the node. Parameters, buffers and their
gradients count from the start; inputs from outside when a task first reads them. What a copy allocates belongs to the
partition that next computes with it. Workspaces inside kernels are not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

# PyTorch has no public way to switch a mode on in one call and off in another: TorchDispatchMode.__enter__ also keeps
# process-wide flags, which threads that overlap would restore in the wrong order.
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from gpipe_bench.autograd.dispatch_mode import DispatchMode, tensors_in
from gpipe_bench.engine.observer import Task
from gpipe_bench.errors import UnsupportedError
from gpipe_bench.measure.devices import distinct_devices
from gpipe_bench.measure.ledger import Ledger
from gpipe_bench.results.timeline import COPY_KINDS

__all__ = ["LiveBytes", "PeakMemory", "has_memory_statistics", "peak_memory", "reset_peak_memory"]


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peaks of one device since the last reset.

    Attributes:
        device: its name, such as ``cuda:0``.
        allocated_bytes: the most that live tensors took, rounded up to the allocator's blocks.
        reserved_bytes: the most that the allocator held, free blocks and fragmentation included. Published figures
            are often this one.
    """

    device: str
    allocated_bytes: int
    reserved_bytes: int


def has_memory_statistics(device: torch.device | str) -> bool:
    """Whether the allocator of ``device`` can tell its peaks; :class:`LiveBytes` counts where it cannot."""
    device = torch.device(device)
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != device.type:
        return False
    return hasattr(torch.get_device_module(device), "max_memory_reserved")


def reset_peak_memory(devices: Iterable[torch.device | str]) -> None:
    """Start new peaks on each distinct device: empty its cache first, so that reserved memory starts low too.

    Raises:
        UnsupportedError: a device whose allocator keeps no statistics.
    """
    for device in _checked(devices):
        torch.accelerator.synchronize(device)
        with torch.accelerator.device_index(device.index):
            torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def peak_memory(devices: Iterable[torch.device | str]) -> list[PeakMemory]:
    """Peaks of each distinct device, in the order of their first use.

    Raises:
        UnsupportedError: a device whose allocator keeps no statistics.
    """
    return [
        PeakMemory(
            str(device),
            int(torch.accelerator.max_memory_allocated(device)),
            int(torch.accelerator.max_memory_reserved(device)),
        )
        for device in _checked(devices)
    ]


def _checked(devices: Iterable[torch.device | str]) -> list[torch.device]:
    found = distinct_devices(devices)
    without = [str(device) for device in found if not has_memory_statistics(device)]
    if without:
        raise UnsupportedError(
            f"devices must have an allocator with statistics, got {', '.join(without)}; count with LiveBytes there"
        )
    return found


# The only way to ask it; PyTorch's own anomaly and module trackers do the same.
_current_node = torch._C._current_autograd_node  # noqa: SLF001 - the node that runs is known nowhere else


class BackwardNodes:
    """Owners of the autograd nodes of one thread's backward pass, which mix with those of other tasks.

    Without checkpointing the engine can say where the backward pass of (i, j) begins; its end comes piece by piece, and
    on the CPU one thread runs the nodes of several tasks in turn. But the graph is there. Everything reachable from the
    node where the backward pass of a partition begins belongs to that partition or to an earlier one, so a node belongs
    to the earliest partition from whose beginnings it can be reached:

        begin(i,1) ─► node ─► node ─► begin(i,0) ─► node ─► node
                         1       1              0       0       0      all walks made before these nodes run
    """

    def __init__(self) -> None:
        # Nodes are held, since their Python objects are found again only while somebody does. What they saved is
        # freed all the same, when they have run.
        self._owners: dict[Node, int] = {}

    def begin(self, owner: int) -> None:
        """The backward pass of ``owner`` begins at the node that this thread runs now, if it runs one.

        A walk stops where an earlier one gave nodes to this partition or one before it, so a backward pass costs one
        visit per node and partition at most.
        """
        root: Node | None = _current_node()
        ahead = [] if root is None else [root]
        while ahead:
            node = ahead.pop()
            if self._owners.get(node, owner + 1) > owner:
                self._owners[node] = owner
                # Those without successors accumulate gradients of parameters: several tasks share them.
                ahead += [child for child, _ in node.next_functions if child is not None and child.next_functions]

    def current(self) -> int | None:
        """Owner of the node that this thread runs now; None when it is unknown or there is no node."""
        node: Node | None = _current_node()
        if node is None:
            self.clear()  # the backward pass is over
            return None
        return self._owners.get(node)

    def clear(self) -> None:
        """Forget, and let go of, every node."""
        self._owners.clear()


class _Watch(DispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves these two untyped
    """A mode that shows each operation of its thread to ``owner``."""

    def __init__(self, owner: LiveBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.owner = owner

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, and show its operands and results."""
        results = func(*args, **kwargs)
        self.owner.account(list(tensors_in((args, kwargs))), list(tensors_in(results)))
        return results


def _switch_on(owner: LiveBytes) -> _Watch:
    """Show the operations of this thread to ``owner`` from now on."""
    watch = _Watch(owner)
    _push_mode(watch)
    return watch


def _switch_off(watch: _Watch | None) -> None:
    """Switch a mode off that this thread switched on.

    One that is not on top was switched on inside an autograd node, which has taken it away since.
    """
    if watch is not None and _get_current_dispatch_mode_stack()[-1:] == [watch]:
        _pop_mode()


@dataclass(slots=True, eq=False)
class _Running:
    """A task under observation: the token between start and finish."""

    task: Task
    among: list[_Running]
    watch: _Watch | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[_Running] = []
        self.nodes = BackwardNodes()


@dataclass(frozen=True, slots=True)
class LivePoint:
    """Live bytes at the end of a task.

    Attributes:
        task: the task.
        live_bytes: of each partition.
    """

    task: Task
    live_bytes: tuple[int, ...]


class LiveBytes:
    """Counts live tensor bytes, and is an :class:`gpipe_bench.engine.observer.Observer` for a pipeline.

        with LiveBytes(pipe) as live, pipe.observe(live):
            step()
        live.peak_bytes
        live.timeline  # live bytes after each task

    Enter it in the thread that calls ``backward``. It slows every operation down: never time a step under it.

    Args:
        module: a pipeline, whose ``partitions`` are counted apart; any other module counts as one partition, and
            needs no tasks.
    """

    def __init__(self, module: nn.Module) -> None:
        partitions: Any = getattr(module, "partitions", None)
        self._partitions: list[nn.Module] = [module]
        # Whose an operation without counted operands is: in a pipeline nobody's, until a task reads its result.
        self._default: int | None = 0
        if isinstance(partitions, (list, tuple, nn.ModuleList)):
            self._partitions, self._default = list(partitions), None
        self._ledger = Ledger(len(self._partitions))
        self._timeline: list[LivePoint] = []
        self._thread = _Thread()
        self._watch: _Watch | None = None

    @property
    def timeline(self) -> list[LivePoint]:
        """Live bytes after each task, in the order in which tasks ended."""
        return list(self._timeline)

    @property
    def peak_bytes(self) -> list[int]:
        """The most bytes alive at once, by partition; partitions need not peak together."""
        return self._ledger.peak_bytes

    @property
    def peak_total_bytes(self) -> int:
        """The most bytes alive at once in all partitions."""
        return self._ledger.peak_total_bytes

    @property
    def live_bytes(self) -> list[int]:
        """Bytes alive now, by partition."""
        return self._ledger.live_bytes

    def __enter__(self) -> Self:
        for j, partition in enumerate(self._partitions):
            parameters = [*partition.parameters()]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self._ledger.enter([*partition.buffers(), *parameters, *gradients], j)
        self._watch = _switch_on(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        watch, self._watch = self._watch, None
        _switch_off(watch)
        self._thread.nodes.clear()

    def start(self, task: Task) -> _Running:
        """Count what this thread allocates to the partition of ``task``."""
        running = _Running(task, self._thread.running)
        modes = _get_current_dispatch_mode_stack()
        if not any(isinstance(mode, _Watch) and mode.owner is self for mode in modes):
            running.watch = _switch_on(self)
        running.among.append(running)
        if task.kind == "backward":
            self._thread.nodes.begin(task.partition)
        return running

    def finish(self, token: _Running, nbytes: int) -> None:  # noqa: ARG002 - the interface of an observer
        """End the task of ``token``; further calls do nothing.

        Args:
            token: what :meth:`start` returned.
            nbytes: not used: allocations were counted as they came.
        """
        if token in token.among:
            token.among.remove(token)
            self._timeline.append(LivePoint(token.task, tuple(self._ledger.live_bytes)))
        watch, token.watch = token.watch, None
        _switch_off(watch)

    def account(self, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Enter one operation, which this thread has just run."""
        if self._watch is None:
            return
        task = self._thread.running[-1].task if self._thread.running else None
        owner = self._owner(operands) if task is None else task.partition
        if owner is None:
            self._ledger.refresh([*operands, *results])
        elif task is not None and task.kind in COPY_KINDS:
            self._ledger.refresh(operands)
            self._ledger.enter(results, owner, in_transit=True)
        else:
            self._ledger.enter([*operands, *results], owner)

    def _owner(self, operands: Sequence[Tensor]) -> int | None:
        """Whose an operation outside tasks is."""
        owner = self._thread.nodes.current()
        owner = self._ledger.owner(operands) if owner is None else owner
        return self._default if owner is None else owner
