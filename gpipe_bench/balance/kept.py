"""Costs of layers kept on disk, so that a model is measured once for a device and a shape of its batches.

A file is found again by a fingerprint of the model: the classes of its layers with the code of their forward passes,
all attributes in plain form, and shapes and types of parameters and buffers. Values of parameters do not matter. A
model with an attribute that has no plain form is measured anew each time, rather than mistaken for another.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import CodeType, EllipsisType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench import __version__
from gpipe_bench.balance.layers import tensors_in

__all__ = ["default_folder", "device_name", "fingerprint", "kept_costs"]

_CONTENTS = ("_parameters", "_buffers", "_modules")
# Namespaces of skips tell equal names apart, and are other ones in a model that is built again.
_LEFT_OUT = frozenset({*_CONTENTS, "_skip_namespaces", "training"})


class _NoPlainFormError(Exception):
    """A value that another process could not be told of."""


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/gpipe_bench/balance``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpipe_bench" / "balance"


def kept_costs(
    folder: str | Path | None,
    module: nn.Sequential,
    sample: object,
    question: Mapping[str, object],
    measure: Callable[[], list[float]],
) -> list[float]:
    """What ``measure`` gives, or gave when the same was asked before.

    Args:
        folder: where costs are kept; None to measure.
        module: the model.
        sample: its batch, of which shapes and types count.
        question: whatever else the costs depend on, as plain data.
        measure: gives a cost per layer.
    """
    print_of_model = None if folder is None else fingerprint(module)
    if folder is None or print_of_model is None:
        return measure()
    shapes = [(list(x.shape), str(x.dtype), x.requires_grad) for x in tensors_in(sample)]
    key = [print_of_model, shapes, dict(question), torch.__version__, __version__]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    path = Path(folder) / f"{name}.json"
    with suppress(OSError, ValueError, TypeError):
        costs = [float(cost) for cost in json.loads(path.read_text(encoding="utf-8"))]
        if len(costs) == len(module):
            return costs
    costs = measure()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(costs), encoding="utf-8")
        temporary.replace(path)
    return costs


def device_name(device: torch.device) -> str:
    """The device as its maker calls it, with what else decides how fast it is."""
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"
    module = torch.get_device_module(device)
    tf32 = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    return f"{module.get_device_name(device)} tf32 {tf32}"


def fingerprint(module: nn.Module) -> str | None:
    """Digits that agree for modules that are made alike; None for one that cannot be described."""
    try:
        described = json.dumps(_module(module), sort_keys=True)
    except (_NoPlainFormError, RecursionError):
        return None
    return hashlib.sha256(described.encode()).hexdigest()


def _module(module: nn.Module) -> list[Any]:
    own = {name: _plain(value) for name, value in vars(module).items() if name not in _LEFT_OUT}
    tensors = {
        name: None if tensor is None else _plain(tensor)
        for contents in _CONTENTS[:2]
        for name, tensor in vars(module)[contents].items()
    }
    children = [[name, None if child is None else _module(child)] for name, child in vars(module)["_modules"].items()]
    return [_plain(type(module)), _plain(type(module).forward), own, tensors, children]


def _plain(value: object) -> Any:
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float | complex | bytes | slice | EllipsisType | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, Tensor):
        return [list(value.shape), list(value.stride()), str(value.dtype), value.requires_grad]
    if isinstance(value, tuple | list):
        return [type(value).__name__, *map(_plain, value)]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(json.dumps(_plain(item)) for item in value)]
    if isinstance(value, dict):
        return ["dict", *([_plain(key), _plain(item)] for key, item in value.items())]
    if isinstance(value, Enum):
        return [_plain(type(value)), value.name]
    if isinstance(value, functools.partial):
        return ["partial", _plain(value.func), _plain(value.args), _plain(value.keywords)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_plain(type(value)), *(_plain(getattr(value, field.name)) for field in dataclasses.fields(value))]
    return _function_or_class(value)


def _function_or_class(value: Any) -> Any:
    name = getattr(value, "__qualname__", None)
    owner = getattr(value, "__self__", None)
    # Functions written in C belong to their module, those of torch.* to an object of PyTorch's.
    if name is None or not (owner is None or isinstance(owner, ModuleType) or type(owner).__module__ == "torch._C"):
        raise _NoPlainFormError
    code = getattr(value, "__code__", None)
    enclosed = [_plain(cell.cell_contents) for cell in getattr(value, "__closure__", None) or ()]
    return [str(getattr(value, "__module__", None)), name, None if code is None else _code(code), enclosed]


def _code(code: CodeType) -> list[Any]:
    constants = [_code(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts]
    return [code.co_code.hex(), *code.co_names, constants]
