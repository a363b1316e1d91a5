"""``cuda`` in a script means its virtual devices: names of devices, and the functions of ``torch.cuda`` in use.

``device.type`` stays ``virtual``, since PyTorch lets no device type be called ``cuda``. What a profile does not say,
such as the compute capability, is an error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from gpipe_bench.emulator import device_module
from gpipe_bench.emulator.device_values import values_of
from gpipe_bench.emulator.library import NAME, backend
from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.profile import Profile

_NS_PER_CYCLE: Final = 1
_CUDA: Final = "13.0"
_NCCL: Final = (2, 28, 9)
"""Versions that scripts compare with what a feature needs; nothing here depends on them."""
_READS: Final = frozenset(
    [
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
        *("nonzero", "masked_select", "unique", "bincount"),
        *("__bool__", "__float__", "__int__", "__index__", "__complex__", "__format__", "__repr__", "__str__"),
        *("__array__", "__contains__"),
    ]
)
"""Functions by which a script reads values, or makes shapes of them."""
_KEPT: Final = frozenset(
    # Errors and their checks, tables of names, and what PyTorch calls to find out whether there is CUDA.
    ("CudaError", "DeferredCudaCallError", "OutOfMemoryError", "check_error", "cudaStatus")
)
"""Functions and classes of ``torch.cuda`` that say nothing about a device."""
_STATISTICS: Final = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")


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


def _flat(values: Any) -> Iterator[Any]:
    for one in values:
        if isinstance(one, list | tuple):
            yield from _flat(one)
        else:
            yield one


class _CudaNames(TorchFunctionMode):
    """Holds in the thread that enters it: in autograd's threads ``cuda`` is what PyTorch takes it for.

    It also notes tensors of the CPU that come from values which no device has: they hold NaN, and may not be read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unknown: Any = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [one for one in _flat([*args, *kwargs.values()]) if isinstance(one, Tensor)]
        noted = any(one in self._unknown for one in tensors)
        read = name in _READS and (noted or (name == "tolist" and self._is_unknown(tensors[0])))
        if read or (name == "__getitem__" and any(one in self._unknown for one in tensors[1:])):
            text = "a value that the program reads must be known, got one that a virtual device did not compute"
            raise RuntimeError(f"{text} ({name}); leave it out, or compute it from tensors of at most 64 KiB")
        result = self._called(func, args, kwargs)
        written = args[:1] if name == "__setitem__" else [result]
        made = [one for one in _flat(written) if isinstance(one, Tensor) and one.device.type == "cpu"]
        if made and name != "__get__" and (noted or any(map(self._is_unknown, tensors))):
            for one in made:
                self._unknown[one] = True
        return result

    @staticmethod
    def _is_unknown(tensor: Tensor) -> bool:
        return tensor.device.type == NAME and tensor.numel() > 0 and values_of(tensor) is None

    @staticmethod
    def _called(func: Any, args: Any, kwargs: Any) -> Any:
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


class _Refused:
    """In place of a function, a class or a module of ``torch.cuda`` that virtual devices do not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        text = "a function of torch.cuda must be one that virtual devices have"
        raise ConfigError([f"{text}, got torch.cuda.{self._name}; leave it out"])

    __call__ = __instancecheck__ = __subclasscheck__ = __mro_entries__ = _refuse

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Refused(f"{self._name}.{attribute}")()


def _others(known: Mapping[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    """The public functions and classes of ``torch.cuda`` and its modules: where, the name, and what replaces it."""
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.cuda.")]
    modules = [module for module in modules if module.__name__.split(".")[2] not in {"amp", "nvtx"}]
    for module in (torch.cuda, *modules):
        short = module.__name__.removeprefix("torch.cuda").lstrip(".")
        for name, value in list(vars(module).items()):
            own = str(getattr(value, "__module__", "")).startswith("torch.cuda") and callable(value)
            if name.startswith("_") or not own or name in _KEPT:
                continue
            if getattr(torch.cuda, name, None) is value or name in known:
                yield module, name, known.get(name) or _Refused(name)
            elif "_" not in {part[:1] for part in short.split(".")}:
                yield module, name, _Refused(f"{short}.{name}")


def _statistics(device: Any = None) -> dict[str, int]:
    """Those that virtual devices count; another key is a KeyError."""
    found = torch.accelerator.memory_stats(_index(device))
    keys = [f"{kind}.all.{when}" for kind in _STATISTICS for when in ("current", "peak")]
    return {key: found[key] for key in keys}


def _free_and_total(profile: Profile, device: Any) -> tuple[int, int]:
    return profile.capacity_bytes - torch.accelerator.memory_reserved(_index(device)), profile.capacity_bytes


class _NoRanges:
    """NVTX: ranges mark what a profiler shows, and no profiler looks at virtual devices."""

    rangePushA = rangePop = rangeStartA = rangeEnd = markA = staticmethod(lambda *_: 0)  # noqa: N815 - its names


def _copied_to_cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """As ``torch.save`` copies: without types. Bytes that nobody knows are those of NaN in each floating-point type."""
    if storage.device.type == "cpu":
        return storage
    values = values_of(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    if values is not None:
        return values.untyped_storage()
    warnings.warn(
        "torch.save writes NaN for floating-point tensors whose values no virtual device has, and -1 for integers",
        stacklevel=2,
    )
    return torch.full((storage.nbytes(),), 0xFF, dtype=torch.uint8).untyped_storage()


def _first_seed() -> int:
    return device_module.default_generators[device_module.current_device()].initial_seed()


def _drawn_seed() -> int:
    return int(torch.randint(2**62, ()))


def _set_states(states: Iterable[Tensor]) -> None:
    for generator, state in zip(device_module.default_generators, states, strict=False):
        generator.set_state(state)


def _functions(profile: Profile) -> dict[str, Any]:
    accelerator: Any = torch.accelerator
    properties = SimpleNamespace(name=profile.device, total_memory=profile.capacity_bytes)
    memory: dict[str, Callable[..., Any]] = {
        name: lambda device=None, name=name: getattr(accelerator, name)(_index(device))
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    }
    return {
        **memory,
        "memory_stats": _statistics,
        "mem_get_info": lambda device=None: _free_and_total(profile, device),
        "memory_cached": memory["memory_reserved"],
        "max_memory_cached": memory["max_memory_reserved"],
        "default_generators": device_module.default_generators,
        "initial_seed": _first_seed,
        "seed": lambda: device_module.manual_seed(_drawn_seed()),
        "seed_all": lambda: device_module.manual_seed_all(_drawn_seed()),
        "get_rng_state_all": lambda: [one.get_state() for one in device_module.default_generators],
        "set_rng_state_all": _set_states,
        "is_current_stream_capturing": lambda: False,
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
        "reset_max_memory_allocated": lambda device=None: accelerator.reset_peak_memory_stats(_index(device)),
        "reset_max_memory_cached": lambda device=None: accelerator.reset_peak_memory_stats(_index(device)),
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

    functions = _functions(profile)
    others = list(_others(functions))
    for name, function in functions.items():
        replace(torch.cuda, name, function)
        # DDP and FSDP ask the module of the device type.
        if not hasattr(device_module, name):
            replace(device_module, name, function)
    for owner, name, other in others:
        if owner is not torch.cuda or name not in functions:
            replace(owner, name, other)
    replace(torch.cuda.nvtx, "_nvtx", _NoRanges)
    replace(torch.cuda.nccl, "version", lambda: _NCCL)
    replace(torch.version, "cuda", _CUDA)
    replace(torch.backends.cuda, "is_built", lambda: True)
    replace(torch.UntypedStorage, "cpu", _copied_to_cpu)
    tag: Any = torch.serialization.location_tag
    restored: Any = torch.serialization.default_restore_location
    replace(torch.serialization, "location_tag", lambda storage: tag(storage).replace(NAME, "cuda", 1))
    replace(torch.serialization, "default_restore_location", lambda one, location: restored(one, virtual(location)))
    replace(torch.profiler.profile, "__init__", _of_the_cpu(torch.profiler.profile.__init__))
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


def _of_the_cpu(plain: Any) -> Any:
    def init(self: Any, *, activities: Any = None, **options: Any) -> None:
        if activities is None or set(activities) - {torch.profiler.ProfilerActivity.CPU}:
            warnings.warn(
                "PyTorch's profiler sees no virtual device: use --trace FILE of gpipe-bench emulate", stacklevel=2
            )
        plain(self, activities=[torch.profiler.ProfilerActivity.CPU], **options)

    return init


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
