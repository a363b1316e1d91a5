"""Partitions of an ``nn.Sequential`` in place: on their devices, with streams, skips and a schedule."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.components import Components
from gpipe_bench.engine.arguments import (
    check_backward,
    check_balance,
    check_choice,
    check_collection,
    check_settings,
    cuda_devices,
    resolve_devices,
)
from gpipe_bench.engine.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
from gpipe_bench.engine.layers import Device, Layers
from gpipe_bench.engine.microbatch import MicroBatch
from gpipe_bench.engine.observer import Observer
from gpipe_bench.engine.partition import Partition, place
from gpipe_bench.engine.randomness import Randomness
from gpipe_bench.engine.runtime.lists import Choice, checked_schedule, schedule_rows
from gpipe_bench.engine.sequential import check_outermost, check_sharing
from gpipe_bench.engine.streams import Stream, current_stream, record_stream, wait_stream
from gpipe_bench.engine.transfer import TRANSFERS
from gpipe_bench.skip.layout import SkipLayout, inspect_skip_layout, verify_skippables

__all__ = ["InPlace"]


class InPlace(Layers):
    """Partitions of an nn.Sequential in place; see :class:`gpipe_bench.engine.gpipe.GPipe` for the arguments.

    Args:
        container: class of the partitions.
        several: how many devices a schedule with several partitions per device is for, if ``devices`` has one entry per
            partition all the same.
    """

    _layout: SkipLayout
    _deferred: list[DeferredBatchNorm]
    _rows: tuple[int, ...]
    _places: list[Partition]
    _randomness: Randomness
    _observer: Observer | None
    _lock: threading.Lock

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | None,
        *,
        devices: Sequence[Device] | None,
        chunks: int,
        checkpoint: str,
        deferred_batch_norm: bool,
        components: Components | None,
        schedule: Any,
        backward: str | None,
        transfer: str,
        workers: str,
        container: type[nn.Sequential] = nn.Sequential,
        several: int | None = None,
    ) -> None:
        super().__init__()
        balance = check_collection("balance", balance, "a list of layers per partition, such as [2, 2]")
        devices = check_collection("devices", devices, "a list of devices, one per partition, such as ['cuda:0']")
        if components is not None and not isinstance(components, Components):
            raise TypeError(
                f"components must be a gpipe_bench.Components, got {components!r}; write Components(portals=False), or "
                "Components.from_label('dep-str-x')"
            )
        if not isinstance(deferred_batch_norm, bool):
            raise TypeError(f"deferred_batch_norm must be True or False, got {deferred_batch_norm!r}; use one of them")
        check_outermost(module)
        self.chunks = check_settings(chunks, checkpoint, workers)
        check_choice("transfer", transfer, TRANSFERS)
        check_sharing(module)
        self.balance = check_balance(module, balance)
        verify_skippables(module)
        self.components = components or Components()
        scheduled = check_backward(backward, has_schedule=schedule is not None)
        self.checkpoint = checkpoint
        self.backward_mode = "scheduled" if scheduled else "autograd"
        self.transfer = transfer
        self.workers = workers
        self.deferred_batch_norm = deferred_batch_norm
        schedule = checked_schedule(schedule)
        count = len(cuda_devices() if devices is None else devices)
        rows = self._rows = schedule_rows(schedule, len(self.balance), several or count)
        # One entry for each device of the schedule, or one for each partition.
        entries = rows if several is None and len(set(rows)) < len(rows) else range(len(rows))
        found = resolve_devices(devices, max(entries, default=-1) + 1, len(rows))
        self.devices = [found[entry] for entry in entries]
        self._choice = Choice(schedule or "gpipe", self.devices, max(rows, default=0) + 1) if scheduled else None
        self._arrange(module, container)
        self._prepare()

    def _arrange(self, module: nn.Sequential, container: type[nn.Sequential]) -> None:
        """Make partitions of the layers of ``module``."""
        if self.deferred_batch_norm:
            convert_deferred_batch_norm(module)
        self._take(module, container)
        layout = inspect_skip_layout(self.partitions)
        deferred = [layer for layer in module.modules() if isinstance(layer, DeferredBatchNorm)]
        self.__dict__.update(_layout=layout, _deferred=deferred)

    def _settle(self) -> None:
        """Let those layers run that are registered now: since the last batch some may have been replaced.

        Raises:
            TypeError: skips do not match.
            ValueError: see :meth:`Layers._replaced`.
        """
        with self._lock:
            module = self._replaced()
            if module is None:
                return
            verify_skippables(module)
            self._arrange(module, type(self.partitions[0]))
            before = self._places
            self._prepare()
            for now, old in zip(self._places, before, strict=True):
                now.own_stream, now.copying = old.own_stream, old.copying

    def _prepare(self) -> None:
        """Everything that belongs to this process and cannot be copied or pickled."""
        options: Any = {"portals": self.components.portals, "transfer": self.transfer}
        self.__dict__.update(
            _places=place(self.partitions, self.devices, self._rows, self._layout, **options),
            _randomness=Randomness(self.devices),
            _observer=self.__dict__.get("_observer"),
            _lock=self.__dict__.get("_lock", threading.Lock()),
        )

    def __getstate__(self) -> dict[str, Any]:
        process_bound = {"_places", "_randomness", "_observer", "_lock"}
        return {key: value for key, value in self.__dict__.items() if key not in process_bound}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # not annotated in PyTorch
        self._prepare()

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        """Let ``observer`` see every task of the batches in this block, forward and backward."""
        previous = self._observer
        self.__dict__["_observer"] = observer
        try:
            yield
        finally:
            self.__dict__["_observer"] = previous

    def _streams(self) -> list[tuple[torch.device, Stream, Stream]]:
        """For each partition its device, its compute stream, and the caller's stream on the device."""
        return [(each.device, each.computing(), current_stream(each.device)) for each in self._places]

    def _hand_over(self, microbatches: list[MicroBatch], *, entering: bool) -> None:
        """Order partitions with compute streams of their own after the caller's work, or the caller after them."""
        for _, computing, callers in self._streams():
            if entering:
                wait_stream(computing, callers)
            else:
                wait_stream(callers, computing)
        end = self._places[0] if entering else self._places[-1]
        if end.own_stream is not None:
            user = end.own_stream if entering else current_stream(end.device)
            for microbatch in microbatches:
                for value in microbatch.values:
                    if isinstance(value, Tensor):
                        record_stream(value, user)
