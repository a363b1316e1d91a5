"""``torch.virtual``: what PyTorch and the engine ask of a device type's Python module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Event, Stream

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "default_generators",
    "device",
    "device_count",
    "is_available",
    "set_device",
]

default_generators: tuple[torch.Generator, ...] = ()


def init() -> None:
    """Nothing is left to do once the library is loaded."""


def _lazy_init() -> None:
    """Without it PyTorch 2.11 never counts the device type as initialised, and does not synchronise it."""


def is_initialized() -> bool:
    return True


def is_available() -> bool:
    """Whether there are devices: the library is loaded."""
    return True


def device_count() -> int:
    """How many devices there are."""
    return len(default_generators)


def current_device() -> int:
    """The device of this thread."""
    return torch.accelerator.current_device_index()


def set_device(device: torch.device | int) -> None:
    """Make it that of this thread."""
    torch.accelerator.set_device_index(device)


@contextmanager
def device(where: torch.device | str | int) -> Iterator[None]:
    """Make a device current for a block."""
    before = current_device()
    index = where if isinstance(where, int) else torch.device(where).index
    torch.accelerator.set_device_index(before if index is None else index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def synchronize(device: torch.device | int | None = None) -> None:
    torch.accelerator.synchronize(device)


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def get_rng_state(device: torch.device | str | int = "virtual") -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: torch.device | str | int = "virtual") -> None:
    _generator(device).set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _is_in_bad_fork() -> bool:
    return False


def _generator(device: torch.device | str | int) -> torch.Generator:
    index = device if isinstance(device, int) else torch.device(device).index
    return default_generators[current_device() if index is None else index]
