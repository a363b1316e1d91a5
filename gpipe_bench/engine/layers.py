"""The layers of a pipeline: its children, in partitions, on their devices; what is registered is what runs.

A pipeline holds its layers twice: as children under the plain module's names, and in partitions. Programs replace a
layer through the children (``pipe.head = ...``, ``add_module``, ``nn.SyncBatchNorm.convert_sync_batchnorm``; some write
to ``_modules``), so before each batch the two are compared, and the partitions follow. What would move the layers is
refused.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, Self

import torch
from torch import Tensor, nn

from gpipe_bench.components import Components
from gpipe_bench.engine.arguments import (
    SETTINGS,
    check_backward,
    check_balance,
    check_choice,
    check_collection,
    checked_setting,
    cuda_devices,
    named_device,
    resolve_devices,
    split_layers,
)
from gpipe_bench.engine.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
from gpipe_bench.engine.microbatch import MicroBatch
from gpipe_bench.engine.observer import Observer
from gpipe_bench.engine.partition import Partition, place
from gpipe_bench.engine.placed import device_of, taken_out
from gpipe_bench.engine.runtime.lists import Choice, ScheduleLike, checked_schedule, schedule_rows
from gpipe_bench.engine.sequential import PipeSequential, check_outermost, check_sharing
from gpipe_bench.engine.transfer import Stream, current_stream, record_stream, wait_stream
from gpipe_bench.engine.worker import Turns, this_thread
from gpipe_bench.errors import PlacementError, UnsupportedError
from gpipe_bench.skip.layout import SkipLayout, inspect_skip_layout, verify_skippables
from gpipe_bench.util.choices import TRANSFERS

Device = torch.device | str | int

NOT_TRACED: Final = (
    "torch.export, torch.jit, torch.func transforms and forward-mode derivatives must be given a plain module, got a "
    "pipeline, which runs its layers in threads; give them nn.Sequential(*pipe), which has the same layers and weights"
)


class Layers(nn.Module):
    """A module that is a sequence of its children, in partitions; see :class:`gpipe_bench.GPipe` for the arguments."""

    balance: list[int]
    devices: list[torch.device]
    partitions: list[nn.Sequential]
    # Class of the partitions, and whether the caller has placed the layers: then devices has an entry per partition.
    _container: type[nn.Sequential] = nn.Sequential
    _is_placed = False
    _running: list[tuple[str, nn.Module]]
    _layout: SkipLayout
    _deferred: list[DeferredBatchNorm]
    _rows: tuple[int, ...]
    _places: list[Partition]
    _drawing: set[tuple[int, bool]]
    _turns: dict[tuple[bool, bool], Turns]
    _observer: Observer | None
    _lock: threading.Lock

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | None = None,
        *,
        devices: Sequence[Device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        components: Components | None = None,
        schedule: ScheduleLike | Iterable[Iterable[tuple[str, int, int]]] | None = None,
        backward: str | None = None,
        transfer: str = "direct",
        workers: str = "always",
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
        self.chunks, self.checkpoint, self.workers = chunks, checkpoint, workers
        check_choice("transfer", transfer, TRANSFERS)
        check_sharing(module)
        self.balance = check_balance(module, balance)
        verify_skippables(module)
        self.components = components or Components()
        scheduled = check_backward(backward, has_schedule=schedule is not None)
        self.transfer, self.backward_mode = transfer, "scheduled" if scheduled else "autograd"
        self.deferred_batch_norm = deferred_batch_norm
        chosen = checked_schedule(schedule)
        self._rows, self.devices = self._on_devices(chosen, devices)
        self._choice = Choice(chosen or "gpipe", self.devices, max(self._rows, default=0) + 1) if scheduled else None
        self._arrange(module)
        self._prepare()

    def _on_devices(
        self, schedule: ScheduleLike | None, devices: list[Device] | None
    ) -> tuple[tuple[int, ...], list[torch.device]]:
        """For each partition the device of the schedule that it belongs to, and its own device."""
        count = len(cuda_devices() if devices is None else devices)
        if self._is_placed and devices is not None:
            # Layers that are all on one device: a schedule with several partitions per device takes two for one.
            count = len(set(devices)) if len(set(devices)) > 1 else max(count // 2, 1)
        rows = schedule_rows(schedule, len(self.balance), count)
        # One entry for each device of the schedule, or one for each partition.
        entries = rows if not self._is_placed and len(set(rows)) < len(rows) else range(len(rows))
        found = resolve_devices(devices, max(entries, default=-1) + 1, len(rows))
        return rows, [found[entry] for entry in entries]

    def __len__(self) -> int:
        """The number of layers."""
        return len(self._modules)

    def __getitem__(self, index: int) -> nn.Module:
        """A layer by its position, counted from the end if negative."""
        return list(self)[index]

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        """Replace a layer; the next batch runs the new one.

        Raises:
            IndexError: there is no such layer.
        """
        self._modules[list(self._modules)[index]] = layer

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers in order."""
        layers: Any = list(self._modules.values())
        return iter(layers)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, or replace the layer of that name; of a name that is both, the value decides.

        Raises:
            ValueError: ``chunks``, ``checkpoint`` or ``workers`` has a wrong value.
        """
        if name in SETTINGS and not isinstance(value, nn.Module):
            value = checked_setting(name, value)
        if name in self.__dict__ and name in self.__dict__.get("_modules", ()):
            (self._modules if isinstance(value, nn.Module) else self.__dict__)[name] = value
        else:
            super().__setattr__(name, value)

    def cuda(self, device: Device | None = None) -> Self:
        """As :meth:`to`."""
        self._check_stays("cuda" if device is None else device, f"cuda({'' if device is None else device})")
        return self

    def cpu(self) -> Self:
        """As :meth:`to`."""
        self._check_stays("cpu", "cpu()")
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the dtype, as ``nn.Module.to``; a change of device is refused.

        Raises:
            TypeError: a device was given that is not that of all partitions.
        """
        for value in (*args, kwargs.get("device"), kwargs.get("tensor")):
            if isinstance(value, (str, int, torch.device, torch.Tensor)) and not isinstance(value, bool):
                device = value.device if isinstance(value, torch.Tensor) else value
                self._check_stays(device, f"to({device})")
        super().to(*args, **kwargs)
        return self

    def to_empty(self, *, device: Device | None, recurse: bool = True) -> Self:
        """As ``nn.Module.to_empty``; a change of device is refused, as by :meth:`to`."""
        if device is not None:
            self._check_stays(device, f"to_empty(device={device})")
        super().to_empty(device=device, recurse=recurse)
        return self

    def _check_stays(self, device: Device, call: str) -> None:
        try:
            there = {named_device("device", device)}
        except (ValueError, IndexError):
            there = set()
        if there != set(self.devices):
            raise PlacementError(_not_moved(call))

    def _arrange(self, module: nn.Sequential) -> None:
        """Take the layers of ``module`` for children, and make partitions of them."""
        if self.deferred_batch_norm:
            convert_deferred_batch_norm(module)
        partitions = split_layers(module, self.balance, self.devices, self._container)
        # Under their own names, so that parameters are called what they are called in the plain module. Not by
        # add_module, which refuses names that this class uses itself.
        self._modules.clear()
        self._modules.update(module.named_children())
        # Past nn.Module.__setattr__, which would take a layer of the same name for the one to be replaced.
        self.__dict__.update(
            partitions=partitions,
            _running=list(module.named_children()),
            _layout=inspect_skip_layout(partitions),
            _deferred=[layer for layer in module.modules() if isinstance(layer, DeferredBatchNorm)],
        )

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse ``torch.jit.script``, which asks this of each module."""
        raise UnsupportedError(NOT_TRACED)

    def _settle(self) -> None:
        """Let those layers run that are registered now: since the last batch some may have been replaced.

        Raises:
            RuntimeError: a batch of this pipeline is running, and this thread works for it.
            UnsupportedError: a trace or a function transform calls the pipeline.
        """
        # The stack of function transforms has no public name.
        transformed = torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001 - see above
        traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # PyTorch has not annotated it
        if transformed or traced or torch.compiler.is_exporting():
            raise UnsupportedError(NOT_TRACED)
        if self._lock in this_thread.locks and self._lock.locked():
            raise RuntimeError(
                "a pipeline must run one batch at a time, got a call from a loss, layer or hook of a batch that runs; "
                "compute it before the batch, or call another pipeline or the plain module"
            )
        with self._lock:
            module = self._replaced()
            if module is None:
                return
            verify_skippables(module)
            self._arrange(module)
            self._prepare()

    def _prepare(self) -> None:
        """Everything that belongs to this process and cannot be copied or pickled."""
        options: Any = {"portals": self.components.portals, "transfer": self.transfer}
        self.__dict__.update(
            _places=place(self.partitions, self.devices, self._rows, self._layout, **options),
            _drawing=set(),
            _turns={},
            _observer=self.__dict__.get("_observer"),
            _lock=self.__dict__.get("_lock", threading.Lock()),
        )

    def __getstate__(self) -> dict[str, Any]:
        process_bound = {"_places", "_drawing", "_turns", "_observer", "_lock"}
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

    def _replaced(self) -> nn.Sequential | None:
        """The layers that are registered now, in their old order; None if they are those that run."""
        if [layer for partition in self.partitions for layer in partition] != [layer for _, layer in self._running]:
            raise ValueError(_refusal("another layer in pipe.partitions", "write pipe[index] = layer"))
        if list(self._modules.items()) == self._running:
            return None
        if changed := self._modules.keys() ^ {name for name, _ in self._running}:
            raise ValueError(_refusal(f"{sorted(changed)} added or removed", "make a new pipeline of other layers"))
        places = [device for device, size in zip(self.devices, self.balance, strict=True) for _ in range(size)]
        layers = OrderedDict[str, nn.Module]()
        for (name, old), device in zip(self._running, places, strict=True):
            new = self._modules[name]
            layers[name] = old if new is old else self._checked(name, new, device)
        whole = nn.Sequential(layers)
        check_sharing(whole)
        return whole

    def _checked(self, name: str, layer: nn.Module | None, device: torch.device) -> nn.Module:
        """A new layer, as the constructor would have taken it."""
        if layer is None:
            raise ValueError(_refusal(f"None in the place of '{name}'", "put an nn.Identity() there"))
        place = device_of(name, layer)
        if place not in (None, device):
            where = f"'{name}' on {place} in a partition on {device}"
            raise ValueError(_refusal(where, f"move it with .to('{device}') first"))
        return taken_out(layer) if self._container is PipeSequential else layer


def _refusal(got: str, advice: str) -> str:
    return f"layers of a pipeline must be replaced one by one, in their places, got {got}; {advice}"


def _not_moved(call: str) -> str:
    return f"a pipeline must stay on the devices it was made for, got {call}; make a new one on other devices"
