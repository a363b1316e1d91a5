"""``cuda`` in a script means its virtual devices: names of devices, and the functions of ``torch.cuda`` in use.

``device.type`` stays ``virtual``, since PyTorch lets no device type be called ``cuda``. What a profile does not say,
such as the compute capability, is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpipe_bench.emulator import device_module
from gpipe_bench.emulator.library import NAME, backend
from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.profile import Profile

_NS_PER_CYCLE: Final = 1
_ABSENT: Final = (
    *("CUDAGraph", "graph", "make_graphed_callables", "mem_get_info", "memory_summary", "memory_snapshot"),
    *("get_device_capability", "utilization", "power_draw", "temperature", "clock_rate", "nccl"),
)


def virtual(value: Any) -> Any:
    """A name of a CUDA device as that of a virtual one; other values as they are."""
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return value.replace("cuda", NAME, 1)
    return value


def _index(device: Any = None) -> int:
    if device is None:
        return device_module.current_device()
    index = device if isinstance(device, int) else torch.device(virtual(device)).index
    return device_module.current_device() if index is None else index


class _CudaNames(TorchFunctionMode):
    """Holds in the thread that enters it: in autograd's threads ``cuda`` is what PyTorch takes it for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], Tensor):
            device = args[1] if len(args) > 1 else kwargs.get("device")
            return args[0].to(f"{NAME}:{_index(device)}", non_blocking=kwargs.get("non_blocking", False))
        if name == "__get__" and getattr(func, "__self__", None) is Tensor.is_cuda:
            return args[0].device.type == NAME
        if any(isinstance(one, str) for one in args) or isinstance(kwargs.get("type"), str) or "device" in kwargs:
            args = tuple(map(virtual, args))
            kwargs = {key: virtual(value) for key, value in kwargs.items()}
            # A number alone means CUDA.
            if type(kwargs.get("device")) is int:
                kwargs["device"] = f"{NAME}:{kwargs['device']}"
        return func(*args, **kwargs)


class _Alike(type):
    """Scripts ask ``isinstance(stream, torch.cuda.Stream)``."""

    plain: type

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, cls.plain)


class _Stream(metaclass=_Alike):
    plain = torch.Stream

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Any:
        return torch.Stream(f"{NAME}:{_index(device)}", priority=priority)


class _Event(metaclass=_Alike):
    plain = torch.Event

    def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
        return torch.Event(NAME, enable_timing=enable_timing)


def _sleep(cycles: int) -> None:
    """As a device of 1 GHz: a cycle is a nanosecond."""
    before = backend().vd_set_duration(int(cycles) * _NS_PER_CYCLE)
    try:
        torch.zeros(1, device=NAME)
    finally:
        backend().vd_set_duration(before)


def _refused(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        text = "a function of torch.cuda must be one that virtual devices have"
        raise ConfigError([f"{text}, got torch.cuda.{name}; leave it out"])

    return refuse


def _functions(profile: Profile) -> dict[str, Any]:
    accelerator: Any = torch.accelerator
    properties = SimpleNamespace(name=profile.device, total_memory=profile.capacity_bytes)
    memory: dict[str, Callable[..., Any]] = {
        name: lambda device=None, name=name: getattr(accelerator, name)(_index(device))
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    }
    return {
        **memory,
        **{name: _refused(name) for name in _ABSENT},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": device_module.device_count,
        "current_device": device_module.current_device,
        "set_device": lambda device: device_module.set_device(_index(device)),
        "device": lambda device: device_module.device(_index(device)),
        "synchronize": lambda device=None: accelerator.synchronize(_index(device)),
        "current_stream": lambda device=None: accelerator.current_stream(_index(device)),
        "default_stream": lambda device=None: torch.Stream(stream_id=0, device_index=_index(device), device_type=20),
        "set_stream": accelerator.set_stream,
        "stream": lambda stream: nullcontext() if stream is None else stream,
        "Stream": _Stream,
        "Event": _Event,
        "_sleep": _sleep,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "reset_peak_memory_stats": lambda device=None: accelerator.reset_peak_memory_stats(_index(device)),
        "manual_seed": device_module.manual_seed,
        "manual_seed_all": device_module.manual_seed_all,
        "get_rng_state": lambda device=None: device_module.get_rng_state(_index(device)),
        "set_rng_state": lambda state, device=None: device_module.set_rng_state(state, _index(device)),
        "get_device_name": lambda device=None: profile.device,  # noqa: ARG005
        "get_device_properties": lambda device=None: properties,  # noqa: ARG005
        "is_bf16_supported": lambda *_, **__: True,
    }


@contextmanager
def cuda_names(profile: Profile) -> Iterator[None]:
    """Let ``cuda`` mean the virtual devices of this process in the block; load them before."""
    import torch.distributed.device_mesh as mesh

    before: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, getattr(owner, name, None)))
        setattr(owner, name, value)

    for name, function in _functions(profile).items():
        replace(torch.cuda, name, function)
        # DDP and FSDP ask the module of the device type.
        if not hasattr(device_module, name):
            replace(device_module, name, function)
    for owner, default in ((torch.autocast, None), (torch.amp.GradScaler, "cuda")):
        replace(owner, "__init__", _first_named(owner.__init__, default))
    # What copies a checkpoint to the CPU asks for the device type whose tensors it must copy.
    for module in (torch._utils, sys.modules.get("torch.distributed.checkpoint.filesystem")):  # noqa: SLF001 - where it is
        if module is not None:
            replace(module, "_get_available_device_type", lambda: NAME)
    plain = mesh.init_device_mesh
    for place in (mesh, torch.distributed):
        replace(place, "init_device_mesh", lambda kind, *args, **options: plain(virtual(kind), *args, **options))
    try:
        with _CudaNames():
            yield
    finally:
        for owner, name, value in reversed(before):
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _first_named(plain: Any, default: str | None) -> Any:
    def init(self: Any, *args: Any, **options: Any) -> None:
        if args:
            args = virtual(args[0]), *args[1:]
        elif "device_type" in options or default is None:
            options["device_type"] = virtual(options["device_type"])
        else:
            args = virtual(options.pop("device", default)), *args
        plain(self, *args, **options)

    return init
