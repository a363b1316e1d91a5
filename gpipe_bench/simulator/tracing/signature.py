"""Layers that are made alike leave the same trace: a signature says so, and each kind of layer is traced once.

Two layers have one signature if they are of one class and agree in every attribute, in the shapes of parameters and
buffers, in what is trained, and in the layers inside. An attribute without a plain form counts by identity.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, type)
# Names of skips matter, the namespaces that tell equal names apart do not.
_SKIPPED = frozenset({"_parameters", "_buffers", "_modules", "_skip_namespaces"})
# Dictionaries of hooks that every module has, mostly empty: then they say nothing.
_HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict)) - _SKIPPED


def signature(layer: nn.Module) -> Hashable:
    """What the trace of a layer depends on, its inputs aside; valid while the layer lives."""
    order = {id(parameter): number for number, parameter in enumerate(layer.parameters())}
    return _of_module(layer, order)


def _of_module(module: nn.Module, order: dict[int, int]) -> Hashable:
    attributes = vars(module)
    return (
        type(module),
        tuple((name, _of_value(attributes[name])) for name in sorted(_told(attributes))),
        tuple(
            (name, None if value is None else (order[id(value)], _of_tensor(value)))
            for name, value in attributes["_parameters"].items()
        ),
        tuple((name, None if value is None else _of_tensor(value)) for name, value in attributes["_buffers"].items()),
        tuple(
            (name, None if value is None else _of_module(value, order))
            for name, value in attributes["_modules"].items()
        ),
    )


def _told(attributes: dict[str, object]) -> list[str]:
    """Names of the attributes that count."""
    return [name for name, value in attributes.items() if name not in _SKIPPED and (name not in _HOOKS or value)]


def _of_tensor(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _of_value(value: object) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(_of_value(item) for item in value)
    if isinstance(value, set | frozenset) and all(isinstance(item, str) for item in value):
        return type(value), tuple(sorted(value))
    if isinstance(value, dict):
        return type(value), tuple((_of_value(key), _of_value(item)) for key, item in value.items())
    return id(value)
