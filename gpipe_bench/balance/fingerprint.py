"""A digest of a model's structure: equal for models that are built alike, also in other processes.

It covers the classes of the layers with the code of their methods, all attributes in plain form, and shapes and types
of parameters and buffers, but not the values of parameters. A model with an attribute that has no plain form has no
fingerprint, so it cannot be taken for another model.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from enum import Enum
from types import CodeType, EllipsisType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_CONTENTS = ("_parameters", "_buffers", "_modules")
# Namespaces of skips tell equal names apart, and are other ones in a model that is built again.
_LEFT_OUT = frozenset({*_CONTENTS, "_skip_namespaces", "training"})


class _NoPlainFormError(Exception):
    """A value that has no plain form, which another process would understand."""


def fingerprint(module: nn.Module) -> str | None:
    """A hexadecimal digest, equal for modules that are built alike; None for a module without a plain form."""
    try:
        classes = dict.fromkeys(kind for part in module.modules() for kind in type(part).__mro__)
        described = json.dumps([_module(module), *map(_class, classes)], sort_keys=True)
    except (_NoPlainFormError, RecursionError, ValueError):  # of a closure that is still empty
        return None
    return hashlib.sha256(described.encode()).hexdigest()


def plain_form(value: object) -> Any:
    """A value as JSON can hold it, of tensors shape, strides and type; None for one that has no plain form."""
    try:
        return _plain(value)
    except (_NoPlainFormError, RecursionError):
        return None


def _class(kind: type) -> list[Any]:
    """A class that was written outside of PyTorch, by everything that its body defines."""
    if kind is object or _root(kind) == "torch":
        return []
    body = {
        name: _method(value)
        for name, value in sorted(vars(kind).items())
        if _functions(value) or not name.startswith(("__", "_abc_"))
    }
    return [_plain(kind), body]


def _functions(value: object) -> list[Any]:
    """The functions that a method or property is made of."""
    if isinstance(value, property):
        return [function for function in (value.fget, value.fset) if function is not None]
    if isinstance(value, functools.cached_property):
        return [value.func]
    value = getattr(value, "__func__", value)
    return [value] if isinstance(value, FunctionType) else []


def _method(value: object) -> Any:
    functions = _functions(value)
    return [_function(function, _leniently, {}) for function in functions] if functions else _leniently(value)


def _leniently(value: object) -> Any:
    """The plain form, or the class alone: decorators of methods enclose objects that have none."""
    try:
        return _plain(value)
    except _NoPlainFormError:
        return ["object", type(value).__qualname__]


def _module(module: nn.Module) -> list[Any]:
    own = {name: _plain(value) for name, value in vars(module).items() if name not in _LEFT_OUT}
    tensors = {
        name: None if tensor is None else _plain(tensor)
        for contents in _CONTENTS[:2]
        for name, tensor in vars(module)[contents].items()
    }
    children = [[name, None if child is None else _module(child)] for name, child in vars(module)["_modules"].items()]
    enclosed = [_plain(cell.cell_contents) for cell in getattr(type(module).forward, "__closure__", None) or ()]
    return [_plain(type(module)), enclosed, own, tensors, children]


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
    if isinstance(value, FunctionType):
        return _function(value, _plain, {})
    return [str(getattr(value, "__module__", None)), name]


def _function(function: FunctionType, plain: Callable[[object], Any], known: dict[FunctionType, None]) -> list[Any]:
    """A function, with the functions of the same package that it names."""
    known[function] = None
    enclosed = [plain(cell.cell_contents) for cell in function.__closure__ or ()]
    defaults = [plain(function.__defaults__), plain(function.__kwdefaults__)]
    helpers = (
        [] if _root(function) == "torch" else [function.__globals__.get(name) for name in _names(function.__code__)]
    )
    return [
        *(function.__module__, function.__qualname__, _code(function.__code__), enclosed, defaults),
        *(
            _function(helper, _leniently, known)
            for helper in helpers
            if isinstance(helper, FunctionType) and helper not in known and _root(helper) == _root(function)
        ),
    ]


def _root(value: Any) -> str:
    return str(value.__module__).partition(".")[0]


def _names(code: CodeType) -> list[str]:
    """Names that code looks up, the functions within it too."""
    inner = [name for item in code.co_consts if isinstance(item, CodeType) for name in _names(item)]
    return [*code.co_names, *inner]


def _code(code: CodeType) -> list[Any]:
    return [code.co_code.hex(), *code.co_names, [_constant(item) for item in code.co_consts]]


def _constant(item: object) -> Any:
    if isinstance(item, CodeType):
        return _code(item)
    # The order of a set is another one in the next process.
    return sorted(map(repr, item)) if isinstance(item, frozenset) else repr(item)
