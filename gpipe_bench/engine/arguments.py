"""Checking what a pipeline is made of, and splitting it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import TypeVar

import torch
from torch import nn

from gpipe_bench.autograd.sequential import check_outermost, check_sharing
from gpipe_bench.engine.batchnorm import convert_deferred_batch_norm
from gpipe_bench.engine.tied import find_ties
from gpipe_bench.errors import BalanceError, DeviceCountError
from gpipe_bench.settings import LayerCounts, checked
from gpipe_bench.skip.layout import SkipLayout, inspect_skip_layout, verify_skippables

T = TypeVar("T")


def check_collection(name: str, value: Iterable[T] | None, form: str) -> list[T] | None:
    """The items of a collection as a list."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be {form}, got {value!r}; put it into a list")
    return list(value)


def check_balance(module: nn.Sequential, balance: Sequence[int] | None) -> list[int]:
    """Check that ``balance`` hands out the layers of ``module``; gives it in Python's integers."""
    count = len(module)
    if balance is None:
        raise BalanceError(
            f"balance must give the layers per partition, got None; pass e.g. balance=[{count}], or let "
            "gpipe_bench.balance.balance_by_time(n, module, sample) find one"
        )
    # A module without layers has no partitions.
    sizes: list[int] = checked("balance", LayerCounts, balance, BalanceError) if len(balance) else []
    if sum(sizes) != count:
        raise BalanceError(
            f"balance must add up to the {count} layers of the module, got {sizes}, which adds up to "
            f"{sum(sizes)}; correct it, or let gpipe_bench.balance.balance_by_time(n, module, sample) find one"
        )
    return sizes


def resolve_devices(
    devices: Sequence[torch.device | str | int] | None, count: int, partitions: int
) -> list[torch.device]:
    """The first ``count`` devices, with their indices."""
    source = "devices given"
    if devices is None:
        devices, source = cuda_devices(), "CUDA devices on this machine"
    if len(devices) < count:
        raise DeviceCountError(
            f"devices must be at least {count} for {partitions} partitions, got {len(devices)} {source}; pass devices= "
            f"(they may repeat, as in ['cpu'] * {count}) or use fewer partitions"
        )
    return [named_device("devices", device) for device in devices[:count]]


def cuda_devices() -> list[torch.device]:
    """All CUDA devices of this machine."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def named_device(argument: str, name: torch.device | str | int) -> torch.device:
    """The device of that name, with its index: the current one of its type where ``name`` has none."""
    hint = "use one such as 'cpu' or 'cuda:0'"
    try:
        device = torch.device(name)
        here = device.type in ("cpu", "meta")
        count = 0 if here else torch.get_device_module(device).device_count()
    except TypeError as error:
        raise TypeError(f"{argument} must be of names of devices, got {name!r}; {hint}") from error
    except RuntimeError as error:
        raise ValueError(f"{argument} must be what PyTorch knows, got {name!r} ({error}); {hint}") from error
    if here:
        return device
    if count <= (device.index or 0):
        raise DeviceCountError(
            f"{argument} must be on this machine, got {name!r} where PyTorch sees {count} of type {device.type}; use "
            "one that it has, such as 'cpu'"
        )
    if device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def checked_module(module: nn.Sequential, balance: Iterable[int] | None) -> list[int]:
    """Check that a pipeline can be made of a module; gives the layers per partition."""
    check_outermost(module)
    check_sharing(module)
    sizes = check_balance(
        module, check_collection("balance", balance, "a list of layers per partition, such as [2, 2]")
    )
    verify_skippables(module)
    return sizes


def split_layers(
    module: nn.Sequential,
    balance: Sequence[int],
    devices: Sequence[torch.device],
    container: type[nn.Sequential] = nn.Sequential,
    *,
    deferred_batch_norm: bool = False,
) -> tuple[list[nn.Sequential], SkipLayout]:
    """Cut a module into partitions of class ``container`` and move each to its device; layers keep their names.

    A parameter that several partitions have goes to the device of the first one.

    Returns:
        The partitions, and where skips begin and end.
    """
    if deferred_batch_norm:
        convert_deferred_batch_norm(module)
    layers = iter(module.named_children())
    partitions: list[nn.Sequential] = []
    for size, device in zip(balance, devices, strict=True):
        partition = container()
        for name, layer in islice(layers, size):
            partition.add_module(name, layer)
        if device.type == "meta" and any(parameter.device != device for parameter in partition.parameters()):
            raise ValueError(
                f"devices must keep the weights of partition {len(partitions)}, got 'meta', which holds no numbers; "
                "use one such as 'cpu', or a module that was made on 'meta'"
            )
        if device.type != "meta" and any(each.is_meta for each in chain(partition.parameters(), partition.buffers())):
            raise ValueError(
                f"layers must have numbers to be put on a device, got partition {len(partitions)} on 'meta'; call "
                f"module.to_empty(device='{device}') and initialise it before"
            )
        partitions.append(partition)
    ties = find_ties(partitions)
    for partition, device in reversed([*zip(partitions, devices, strict=True)]):
        partition.to(device)
    for tie in ties:
        tie.fasten()
    return partitions, inspect_skip_layout(partitions)
