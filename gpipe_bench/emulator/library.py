"""The compiled backend, loaded: devices, their memory and the host's behaviour."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import torch

from gpipe_bench.emulator import device_module
from gpipe_bench.emulator.build import built
from gpipe_bench.step.request import MOST_EMULATED_DEVICES

NAME = "virtual"
WATCHER = ctypes.CFUNCTYPE(None, ctypes.c_int64)
ELAPSED = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64, ctypes.c_int64)
WATCH = ctypes.CFUNCTYPE(None, ctypes.c_int)
COUNT = ctypes.POINTER(ctypes.c_int64)
_TENSORS = ctypes.POINTER(ctypes.c_void_p)

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "vd_load": (None, [ctypes.c_int, ctypes.c_int, WATCH]),
    "vd_say_kernel": (None, [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]),
    "vd_refuse": (None, [ctypes.c_char_p, ctypes.c_int]),
    "vd_forget": (None, []),
    "vd_device_count": (ctypes.c_int, []),
    "vd_trace_start": (None, []),
    "vd_trace_stop": (None, []),
    "vd_trace_size": (ctypes.c_int64, []),
    "vd_trace_rows": (ctypes.c_void_p, [COUNT]),
    "vd_trace_accesses": (ctypes.c_void_p, [COUNT]),
    "vd_trace_names": (ctypes.c_char_p, []),
    "vd_signal": (ctypes.c_int64, []),
    "vd_await": (None, [ctypes.c_int64]),
    "vd_backward": (ctypes.c_int64, []),
    "vd_backward_end": (None, [ctypes.c_int64]),
    "vd_mark": (ctypes.c_int64, []),
    "vd_meet": (ctypes.c_int64, [ctypes.c_char_p, ctypes.c_int, _TENSORS, ctypes.c_int, ctypes.c_int, ctypes.c_int64]),
    "vd_keep_values": (None, [ctypes.c_int]),
    "vd_values": (ctypes.c_void_p, [ctypes.c_void_p]),
    "vd_write_values": (ctypes.c_void_p, [ctypes.c_void_p]),
    "vd_forget_values": (None, [ctypes.c_void_p]),
    "vd_parameter": (None, [ctypes.c_void_p]),
    "vd_update": (None, [ctypes.c_int, ctypes.c_int64]),
    "vd_set_duration": (ctypes.c_int64, [ctypes.c_int64]),
    "vd_set_jitter": (None, [ctypes.c_uint64, ctypes.c_int]),
    "vd_thread": (ctypes.c_int, []),
    "vd_set_capacity": (None, [ctypes.c_int, ctypes.c_int64]),
    "vd_capacity": (ctypes.c_int64, [ctypes.c_int]),
    "vd_set_watcher": (None, [WATCHER]),
    "vd_set_elapsed": (None, [ELAPSED]),
}


@functools.cache
def backend() -> ctypes.CDLL:
    """The library itself; loading it registers the device type, before the first backward pass of the process."""
    library = ctypes.CDLL(str(built()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_loaded: Final[list[tuple[int, bool]]] = []


def load(count: int = 8, *, watch: Callable[[int], None] | None = None) -> None:
    """Give this process ``count`` virtual devices that compute on the CPU.

    Args:
        count: how many, up to 16.
        watch: devices compute nothing; see :func:`gpipe_bench.emulator.shapes.load_shapes`.

    Raises:
        ValueError: fewer than one or more than 16, or the process has other virtual devices already.
        CompilerError: the backend does not compile.
        OutputError: the user's cache cannot be written.
    """
    if not 1 <= count <= MOST_EMULATED_DEVICES:
        raise ValueError(f"count must be between 1 and {MOST_EMULATED_DEVICES}, got {count}; ask for as many devices")
    wanted = count, watch is not None
    if _loaded:
        if _loaded[0] != wanted:
            raise ValueError(f"a process must have one kind of virtual devices, got {wanted} after {_loaded[0]}")
        return
    # The library keeps the callback's address, not the callback.
    backend().vd_load(*wanted, _kept(watch))
    utils: Any = torch.utils
    utils.rename_privateuse1_backend(NAME)
    device_module.default_generators = tuple(
        torch.ops.virtual_devices.default_generator(index) for index in range(count)
    )
    register: Any = torch._register_device_module  # noqa: SLF001 - what PyTorch tells device types to call
    register(NAME, sys.modules[device_module.__name__])
    utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _loaded.append(wanted)


@functools.cache
def _kept(watch: Callable[[int], None] | None) -> Any:
    return WATCH(watch) if watch else WATCH()


def devices(count: int | None = None) -> list[torch.device]:
    """The first ``count`` devices, or all of them."""
    return [torch.device(NAME, index) for index in range(count or backend().vd_device_count())]


@contextmanager
def capacity(device: torch.device, nbytes: int) -> Iterator[None]:
    """Let ``device`` hold no more than ``nbytes``; beyond them allocations raise torch.OutOfMemoryError."""
    before = backend().vd_capacity(device.index)
    backend().vd_set_capacity(device.index, nbytes)
    try:
        yield
    finally:
        backend().vd_set_capacity(device.index, before)


def thread_index() -> int:
    """The number by which a trace knows the calling thread."""
    return int(backend().vd_thread())


@contextmanager
def each_row(watch: Callable[[int], None]) -> Iterator[None]:
    """Call ``watch`` with the place of each kernel and copy of the trace, in the thread that issues it."""
    callback = WATCHER(watch)
    backend().vd_set_watcher(callback)
    try:
        yield
    finally:
        backend().vd_set_watcher(WATCHER())


def leave(status: int) -> NoReturn:
    """End the process at once, with its output written.

    Autograd's device threads may still be letting go of the last backward pass. Python, on its way out, would end them
    amid C++ code that must not be left so, and the process would abort.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
