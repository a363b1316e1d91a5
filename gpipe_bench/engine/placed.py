"""Partitions read off where the caller has put the layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, groupby, islice
from typing import Any

import torch
from torch import nn

from gpipe_bench.autograd.sequential import check_outermost, children_of, hooks_of, opened
from gpipe_bench.engine.arguments import check_balance, named_device, resolve_devices

_CPU = torch.device("cpu")


class WithDevice(nn.Module):
    """Says on which device of a pipeline a layer runs, where its parameters do not say it.

    The pipeline takes the layer out of this wrapper, so parameters are called as in the layer itself, and moves it.

    Args:
        module: the layer.
        device: its device.

    Raises:
        ValueError: PyTorch knows no such device.
        TypeError: ``device`` is no name of one.
        IndexError: it is not on this machine.
    """

    def __init__(self, module: nn.Module, device: torch.device | str | int) -> None:
        super().__init__()
        self.module = module
        self.device = named_device("device", device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer gives."""
        return self.module(*args, **kwargs)


def device_of(name: str, layer: nn.Module, tied: AbstractSet[nn.Parameter] = frozenset()) -> torch.device | None:
    """Where a layer, or a :class:`WithDevice`, is; None if it has no parameters but ``tied`` ones, and no buffers."""
    if isinstance(layer, WithDevice):
        return layer.device
    own = (parameter for parameter in layer.parameters() if parameter not in tied)
    found = sorted({str(tensor.device) for tensor in chain(own, layer.buffers())})
    if len(found) > 1:
        raise ValueError(
            f"a child of the module must be on one device, got child '{name}' on {', '.join(found)}; move it with "
            ".to(device), or split it into several children"
        )
    return torch.device(found[0]) if found else None


def placed_partitions(module: nn.Sequential) -> tuple[list[int], list[torch.device]]:
    """Layers per partition and device of each: consecutive layers on one device belong together.

    A layer that has no parameters, or only those of layers before it, runs where the layer before it runs, or the one
    after it if it is the first.
    """
    found: list[torch.device | None] = []
    before: set[nn.Parameter] = set()
    for name, child in children_of(module):
        if child is not None:
            found.append(device_of(name, child, before))
            before.update(child.parameters())
    devices: list[torch.device] = []
    current = next((device for device in found if device is not None), _CPU)
    for device in found:
        current = current if device is None else device
        devices.append(current)
    groups = [(device, len(list(group))) for device, group in groupby(devices)]
    return [size for _, size in groups], [device for device, _ in groups]


def partition_model(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device | str | int] | None = None
) -> nn.Sequential:
    """The layers in one ``nn.Sequential`` per partition, each moved to its device, as ``Pipe`` takes them.

    Parameters are called ``<partition>.<layer in it>.<name>``, as in ``torch.distributed.pipeline.sync.utils``.

    Args:
        module: the layers; moved in place.
        balance: layers per partition.
        devices: one per partition; by default accelerators 0, 1, ...

    Raises:
        ValueError: ``balance`` does not add up to the layers, or ``module`` is more than its layers.
        IndexError: fewer devices than partitions.
    """
    check_outermost(module)
    sizes = check_balance(module, balance)
    layers = iter(module)
    places = zip(sizes, resolve_devices(devices, len(sizes), len(sizes)), strict=True)
    return nn.Sequential(*(nn.Sequential(*islice(layers, size)).to(device) for size, device in places))


def unwrapped(module: nn.Sequential) -> nn.Sequential:
    """The same layers under the same names, each as :func:`taken_out` gives it."""
    layers = ((name, layer) for name, layer in children_of(module) if layer is not None)
    return nn.Sequential(OrderedDict((name, taken_out(layer)) for name, layer in layers))


def taken_out(layer: nn.Module) -> nn.Module:
    """A layer without its :class:`WithDevice`; an ``nn.Sequential`` becomes one that hands on several values."""
    if not isinstance(layer, WithDevice):
        return opened(layer)
    if hooks := hooks_of(layer):
        raise ValueError(f"a WithDevice must have no hooks, got {hooks}; register them on its layer")
    return opened(layer.module)
