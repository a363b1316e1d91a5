"""Devices that compute nothing: every result has the right shape, and every kernel its modelled duration.

    load_shapes(4, profile)       instead of library.load(4)

Memory is address space: it reads as zeros, takes no room, and nothing that a program writes to it stays there. What an
operator gives and costs is asked once of the simulator's own functions, and then remembered by operator, shapes, types
and numbers. Random numbers are not drawn. Two things need values:

- A number that the host asks for (``loss.item()``) is computed on zeros, with one warning.
- A result whose shape depends on values (``nonzero``, indices that are masks) is refused: NotImplementedError.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from gpipe_bench.autograd.dispatch_mode import DispatchMode
from gpipe_bench.emulator.library import NAME, backend, load
from gpipe_bench.kernels.accelerator import register_fused
from gpipe_bench.kernels.cost import duration_ns, scratch_bytes, workspace_bytes
from gpipe_bench.kernels.meta_results import evaluate
from gpipe_bench.kernels.operations import kernels_of
from gpipe_bench.machine.profile import Profile
from gpipe_bench.step.request import MOST_EMULATED_DEVICES

_profiles: Final[list[Profile]] = []
# Kernels stay registered as long as their library lives.
_libraries: Final[list[Any]] = []


def load_shapes(count: int, profile: Profile) -> None:
    """Give this process ``count`` virtual devices that compute nothing.

    Args:
        count: how many, up to 16.
        profile: says how long kernels take, how much scratch memory, and what a device holds: beyond that, allocations
            raise torch.OutOfMemoryError.

    Raises:
        ValueError: as :func:`gpipe_bench.emulator.library.load`.
        CompilerError: likewise.
        OutputError: likewise.
    """
    price_by(profile)
    load(count, watch=_watch)
    if not _libraries:
        make: Any = torch.library.Library
        _libraries.append(make("aten", "IMPL"))
        register_fused(_libraries[0], "AutogradPrivateUse1", "PrivateUse1")


def price_by(profile: Profile) -> None:
    """Take the durations of kernels and the memory of devices from another profile."""
    if _profiles != [profile]:
        _profiles[:] = [profile]
        backend().vd_forget()
        for device in range(MOST_EMULATED_DEVICES):
            backend().vd_set_capacity(device, profile.capacity_bytes)


def keep_gradients(parameters: Iterable[Tensor]) -> None:
    """Let the host take its time to keep the first gradients of these, in the trace that is recorded."""
    for parameter in parameters:
        if parameter.device.type == NAME:
            backend().vd_parameter(parameter._cdata)  # noqa: SLF001 - C++ knows it by that


@contextmanager
def updates_priced() -> Iterator[None]:
    """Let the host take its time for each parameter that an optimizer of PyTorch updates, as the profile says."""

    def updates(optimizer: Optimizer, *_: Any) -> None:
        each_ns = round(1000 * _profiles[0].constants.get("parameter_us", 0))
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        keep_gradients(trained)
        places = (one.device for one in trained if one.grad is not None and one.device.type == NAME)
        for device, count in Counter(place.index for place in places).items():
            if each_ns:
                backend().vd_update(device, count * each_ns)

    handle = register_optimizer_step_pre_hook(updates)
    try:
        yield
    finally:
        handle.remove()


class _Watch(DispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves the mode untyped
    """Sees one operator with meta tensors, gives its results, and tells the devices its cost."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with torch._C.DisableTorchFunction():  # noqa: SLF001 - the only one that turns modes off too
                return _asked(func, args, kwargs)
        except Exception as error:  # noqa: BLE001 - raised again by the devices: Python must not see it on the way
            unsupported = isinstance(error, NotImplementedError)
            backend().vd_refuse(_reason(func, error).encode(), unsupported)
            return _nothing(func)


def _asked(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    result = evaluate(func, args, kwargs)
    profile = _profiles[0]
    for kernel in kernels_of(func, args, kwargs, result):
        sizes = scratch_bytes(kernel, profile), workspace_bytes(kernel, profile)
        backend().vd_say_kernel(kernel.op.encode(), duration_ns(kernel, profile), *sizes, kernel.launches)
    return result


def _reason(func: Any, error: Exception) -> str:
    if isinstance(error, NotImplementedError):
        return (
            "an operator must tell the shapes of its results without values while only shapes are emulated, got "
            f"{func}; use another operator"
        )
    return str(error)


def _nothing(func: Any) -> Any:
    """Something of the right types, which nobody will see."""
    kinds = [str(result.type) for result in func._schema.returns]  # noqa: SLF001 - public properties: pytorch#67254
    made = [torch.empty(0, device="meta") if kind == "Tensor" else list[Tensor]() for kind in kinds]
    return None if not made else made[0] if len(made) == 1 else tuple(made)


class _Thread(threading.local):
    """The watch of each thread."""

    def __init__(self) -> None:
        watch: Any = _Watch
        self.watch = watch()


_thread: Final = _Thread()


def _watch(begins: int) -> None:
    if begins:
        _thread.watch.__enter__()
    else:
        _thread.watch.__exit__(None, None, None)
