"""The layers of a pipeline: its children, in partitions, on their devices; what is registered is what runs.

A pipeline holds its layers twice: as children under the plain module's names, and in partitions. Programs replace a
layer through the children (``pipe.head = ...``, ``add_module``, ``nn.SyncBatchNorm.convert_sync_batchnorm``; some write
to ``_modules``), so before each batch the two are compared, and the partitions follow. What would move the layers is
refused.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any, Final, NoReturn, Self

import torch
from torch import nn

from gpipe_bench.autograd.sequential import PipeSequential, check_sharing
from gpipe_bench.components import Components
from gpipe_bench.engine.arguments import named_device, split_layers
from gpipe_bench.engine.batchnorm import DeferredBatchNorm
from gpipe_bench.engine.observer import Observer
from gpipe_bench.engine.placed import device_of, taken_out
from gpipe_bench.engine.tied import Tie
from gpipe_bench.engine.worker import this_thread
from gpipe_bench.errors import PlacementError, UnsupportedError
from gpipe_bench.settings import Checkpoint, Chunks, DefersBatchNorm, Switches, Transfer, Workers, checked
from gpipe_bench.skip.layout import SkipLayout, verify_skippables

Device = torch.device | str | int

_SETTINGS: Final = {
    "chunks": Chunks,
    "checkpoint": Checkpoint,
    "workers": Workers,
    "deferred_batch_norm": DefersBatchNorm,
}
"""Attributes that are checked when they are set; the first three may change between batches."""

NOT_TRACED: Final = (
    "torch.export, torch.jit, torch.func transforms and forward-mode derivatives must be given a plain module, got a "
    "pipeline, which runs its layers in threads; give them nn.Sequential(*pipe), which has the same layers and weights"
)


class PartitionedModule(nn.Module):
    """A module that is a sequence of its children, in partitions, each on its device.

    The modules that users see are such modules, and hold a pipeline that runs the layers.

    Args:
        chunks: see :class:`gpipe_bench.GPipe`, as for the others.
        checkpoint: see there.
        deferred_batch_norm: see there.
        components: see there.
        transfer: see there.
        workers: see there.

    Attributes:
        skip_layout: where skips begin and end.
        deferred_layers: batch normalization that updates its statistics once per batch.
        ties: tied weights, if partitions belong to several processes; else None, since they may change.
        task_observer: told of every task of a batch.
        batch_lock: held by a batch.
    """

    def __init__(
        self,
        *,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        components: Components | None = None,
        transfer: str = "direct",
        workers: str = "always",
    ) -> None:
        super().__init__()
        self.chunks, self.checkpoint, self.workers = chunks, checkpoint, workers
        self.components = checked("components", Switches | None, components) or Components()
        self.transfer = checked("transfer", Transfer, transfer)
        self.deferred_batch_norm = deferred_batch_norm
        self.task_observer: Observer | None = None
        self.batch_lock = threading.Lock()
        self.balance: list[int] = []
        self.devices: list[torch.device] = []
        self.partitions: list[nn.Sequential] = []
        self.skip_layout = SkipLayout({})
        self.deferred_layers: list[DeferredBatchNorm] = []
        self.layers_in_use: list[tuple[str, nn.Module]] = []
        self.ties: Sequence[Tie] | None = None

    def adopt_layers(
        self,
        partitions: list[nn.Sequential],
        layout: SkipLayout,
        balance: list[int],
        devices: list[torch.device],
    ) -> None:
        """Let the layers of these partitions be the children.

        Args:
            partitions: the layers, each under its name in the plain module; empty where another process has them.
            layout: where skips begin and end.
            balance: layers per partition.
            devices: one per partition.
        """
        self.layers_in_use = [child for part in partitions for child in part.named_children()]
        # Under their own names, so that parameters are called what they are called in the plain module. Not by
        # add_module, which refuses names that this class uses itself.
        self._modules.clear()
        self._modules.update(self.layers_in_use)
        self.partitions, self.skip_layout, self.balance, self.devices = partitions, layout, balance, devices
        self.deferred_layers = [
            each for _, layer in self.layers_in_use for each in layer.modules() if isinstance(each, DeferredBatchNorm)
        ]

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
            TypeError: ``deferred_batch_norm`` is no flag.
            ValueError: ``chunks``, ``checkpoint`` or ``workers`` has a wrong value.
        """
        if name in _SETTINGS and not isinstance(value, nn.Module):
            value = checked(name, _SETTINGS[name], value)
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
            rule = "a pipeline must stay on the devices it was made for"
            raise PlacementError(f"{rule}, got {call}; make a new one on other devices")

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse ``torch.jit.script``, which asks this of each module."""
        raise UnsupportedError(NOT_TRACED)

    def check_free(self) -> None:
        """Check that a batch can run.

        Raises:
            RuntimeError: a batch of this pipeline is running, and this thread works for it.
            ValueError: ``partitions`` have other layers than before.
            UnsupportedError: a trace or a function transform calls the pipeline.
        """
        # The stack of function transforms has no public name.
        transformed = torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001 - see above
        traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # PyTorch has not annotated it
        if transformed or traced or torch.compiler.is_exporting():
            raise UnsupportedError(NOT_TRACED)
        if self.batch_lock in this_thread.locks and self.batch_lock.locked():
            raise RuntimeError(
                "a pipeline must run one batch at a time, got a call from a loss, layer or hook of a batch that runs; "
                "compute it before the batch, or call another pipeline or the plain module"
            )
        if [layer for partition in self.partitions for layer in partition] != [
            layer for _, layer in self.layers_in_use
        ]:
            raise ValueError(_refusal("another layer in pipe.partitions", "write pipe[index] = layer"))

    def follow_replacements(self) -> None:
        """Let those layers run that are registered now: since the last batch some may have been replaced.

        Raises:
            ValueError: a new layer cannot take the place of the old one; and as :meth:`check_free`.
        """
        self.check_free()
        with self.batch_lock:
            if list(self._modules.items()) == self.layers_in_use:
                return
            if changed := self._modules.keys() ^ {name for name, _ in self.layers_in_use}:
                raise ValueError(_refusal(f"{sorted(changed)} added or removed", "make a new pipeline of other layers"))
            layers = OrderedDict[str, nn.Module]()
            places = [device for device, size in zip(self.devices, self.balance, strict=True) for _ in range(size)]
            kept = [old for name, old in self.layers_in_use if self._modules[name] is old]
            tied = {parameter for layer in kept for parameter in layer.parameters()}
            for (name, old), device in zip(self.layers_in_use, places, strict=True):
                new = self._modules[name]
                layers[name] = old if new is old else self._checked(name, new, device, tied)
            module = nn.Sequential(layers)
            check_sharing(module)
            verify_skippables(module)
            container, deferred = type(self.partitions[0]), self.deferred_batch_norm
            found = split_layers(module, self.balance, self.devices, container, deferred_batch_norm=deferred)
            self.adopt_layers(*found, self.balance, self.devices)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "task_observer": None, "batch_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # not annotated in PyTorch
        self.batch_lock = threading.Lock()

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        """Let ``observer`` see every task of the batches in this block, forward and backward."""
        previous = self.task_observer
        self.task_observer = observer
        try:
            yield
        finally:
            self.task_observer = previous

    def _checked(
        self, name: str, layer: nn.Module | None, device: torch.device, tied: AbstractSet[nn.Parameter]
    ) -> nn.Module:
        """A new layer, as the constructor would have taken it; it may have the parameters ``tied`` of others."""
        if layer is None:
            raise ValueError(_refusal(f"None in the place of '{name}'", "put an nn.Identity() there"))
        place = device_of(name, layer, tied)
        if place not in (None, device):
            where = f"'{name}' on {place} in a partition on {device}"
            raise ValueError(_refusal(where, f"move it with .to('{device}') first"))
        return taken_out(layer) if isinstance(self.partitions[0], PipeSequential) else layer


def _refusal(got: str, advice: str) -> str:
    return f"layers of a pipeline must be replaced one by one, in their places, got {got}; {advice}"
