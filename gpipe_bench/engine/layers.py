"""The layers of a pipeline as its children: what is registered is what runs.

A pipeline holds its layers twice: as children under the plain module's names, and in partitions. Programs replace a
layer through the children (``pipe.head = ...``, ``add_module``, ``nn.SyncBatchNorm.convert_sync_batchnorm``; some write
to ``_modules``), so before each batch the two are compared, and the partitions follow. What would move the layers is
refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import nn

from gpipe_bench.engine.arguments import split_layers
from gpipe_bench.engine.placed import device_of, taken_out
from gpipe_bench.engine.sequential import PipeSequential, check_sharing
from gpipe_bench.errors import PlacementError

__all__ = ["Device", "Layers"]

Device = torch.device | str | int


class Layers(nn.Module):
    """A module that is a sequence of its children, in partitions.

    Attributes:
        balance: layers per partition.
        devices: device of each partition.
        partitions: the layers of each partition.
    """

    balance: list[int]
    devices: list[torch.device]
    partitions: list[nn.Sequential]
    _running: list[tuple[str, nn.Module]]

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
        """Set an attribute, or replace the layer of that name; of a name that is both, the value decides."""
        if name in self.__dict__ and name in self.__dict__.get("_modules", ()):
            (self._modules if isinstance(value, nn.Module) else self.__dict__)[name] = value
        else:
            super().__setattr__(name, value)

    def cuda(self, device: Device | None = None) -> NoReturn:
        """Refused: see :meth:`to`."""
        raise PlacementError(_not_moved(f"cuda({'' if device is None else device})"))

    def cpu(self) -> NoReturn:
        """Refused: see :meth:`to`."""
        raise PlacementError(_not_moved("cpu()"))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the dtype, as ``nn.Module.to``; a change of device is refused.

        Raises:
            TypeError: a device was given.
        """
        for value in (*args, kwargs.get("device"), kwargs.get("tensor")):
            if isinstance(value, (str, int, torch.device, torch.Tensor)) and not isinstance(value, bool):
                raise PlacementError(_not_moved(f"to({getattr(value, 'device', value)})"))
        super().to(*args, **kwargs)
        return self

    def _take(self, module: nn.Sequential, container: type[nn.Sequential]) -> None:
        """Take the layers of ``module`` for children, and split them into partitions of class ``container``."""
        partitions = split_layers(module, self.balance, self.devices, container)
        # Under their own names, so that parameters are called what they are called in the plain module. Not by
        # add_module, which refuses names that this class uses itself.
        self._modules.clear()
        self._modules.update(module.named_children())
        # Past nn.Module.__setattr__, which would take a layer of the same name for the one to be replaced.
        self.__dict__.update(partitions=partitions, _running=_items(partitions))

    def _replaced(self) -> nn.Sequential | None:
        """The layers that are registered now, in their old order; None if they are those that run.

        Raises:
            ValueError: layers were added, removed, or replaced in a partition; a new one is on another device than its
                partition, or shares parameters with another layer.
        """
        if _items(self.partitions) != self._running:
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
        return taken_out(layer) if isinstance(self.partitions[0], PipeSequential) else layer


def _refusal(got: str, advice: str) -> str:
    return f"layers of a pipeline must be replaced one by one, in their places, got {got}; {advice}"


def _items(partitions: Sequence[nn.Sequential]) -> list[tuple[str, nn.Module]]:
    items: Any = [item for partition in partitions for item in partition._modules.items()]  # noqa: SLF001 - None as well
    given: list[tuple[str, nn.Module]] = items
    return given


def _not_moved(call: str) -> str:
    return f"a pipeline must stay on the devices it was made for, got {call}; make a new one on other devices"
