"""Runs operations on the meta device, each with given operands once.

PyTorch computes many shapes in Python, which takes half of the time to trace a model. So results are remembered as
specs.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from gpipe_bench.kernels.specs import TensorSpec, map_specs
from gpipe_bench.skip.trees import tree_leaves

_aten: Final = torch.ops.aten
_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_results: Final[dict[Hashable, Any]] = {}
_tried: Final[set[Any]] = set()


def evaluate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``func(*args, **kwargs)`` gives."""
    if func is _aten.col2im.default:
        return _in_memory_of(args[0], func(*args, **kwargs))
    key = _key_of_call(func, args, kwargs)
    if key is None:
        if func not in _tried:
            _tried.add(func)
            # Only for what PyTorch imports at the first call.
            with suppress(RuntimeError, TypeError, ValueError):
                _elsewhere(func, _copied(args), _copied(kwargs))
        return func(*args, **kwargs)
    if key not in _results:
        _results[key] = _recipe_of(func, args, kwargs)
    recipe = _results[key]
    return func(*args, **kwargs) if recipe is None else map_specs(TensorSpec.empty, recipe)


def _recipe_of(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation's results with specs in the place of tensors; None if they cannot be made anew from these."""
    copies, named = _copied(args), _copied(kwargs)
    result = _elsewhere(func, copies, named)
    if func is _aten.convolution.default:
        result = _like_operands(result, copies[:2])
    return _recipe(result, {storage_key(tensor) for tensor in _tensors([copies, named])})


def _like_operands(result: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Of a convolution: channels last if those of its input or its weight are, as on any device but meta."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(result.dim())
    # A tensor that is both says nothing.
    if last is None or all(x.is_contiguous() or not x.is_contiguous(memory_format=last) for x in operands):
        return result
    return result.contiguous(memory_format=last)


def _in_memory_of(columns: Tensor, result: Tensor) -> Tensor:
    """What is folded from columns: on all devices but meta it is made as large as these, and then smaller."""
    memory = torch.empty(max(columns.numel(), result.numel()), dtype=result.dtype, device="meta")
    return memory.as_strided(result.shape, result.stride())


def _elsewhere(func: Any, args: Any, kwargs: Any) -> Any:
    """Call in another thread.

    A first call imports modules, and an exception that is caught on the way may stay in a reference cycle with its
    traceback, and so with every frame below it. Those of the model must not be among them: they hold its tensors.
    """
    return _thread(os.getpid()).submit(func, *args, **kwargs).result()


@cache
def _thread(_process: int) -> ThreadPoolExecutor:
    """The thread of a process, since a fork takes none along."""
    return ThreadPoolExecutor(1)


def _copied(value: Any) -> Any:
    return map_specs(lambda tensor: TensorSpec.of(tensor).empty(), value)


def _key_of_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """What the result depends on; None for an operation that writes to operands, views them, or takes other objects."""
    if func.is_view or func._schema.is_mutable:  # noqa: SLF001 - public properties: pytorch#67254
        return None
    try:
        # Of integers some operations make numbers of the default type.
        return func, _plain(args), _plain([*kwargs.items()]), torch.get_default_dtype()
    except TypeError:
        return None


def _plain(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        # 1, 1.0 and True are equal, but operations tell them apart.
        return type(value), value
    if isinstance(value, Tensor):
        if value.device.type != "meta" or value.layout is not torch.strided:
            raise TypeError
        return value.shape, value.stride(), value.dtype, value.is_conj()
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    raise TypeError


def _recipe(result: Any, operands: set[int]) -> Any:
    """The specs of results; None if they share memory with operands or each other, or do not fill their storage."""
    tensors = _tensors(result)
    keys = set(map(storage_key, tensors))
    if len(keys) < len(tensors) or keys & operands:
        return None
    for tensor in tensors:
        full = TensorSpec.of(tensor).empty()
        if full.untyped_storage().nbytes() != tensor.untyped_storage().nbytes() or tensor.device.type != "meta":
            return None
    return map_specs(TensorSpec.of, result)


def storage_key(tensor: Tensor) -> int:
    """What tells the storage of a tensor from all others that are there."""
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - it has no public name
    return key


def _tensors(value: Any) -> list[Tensor]:
    return [item for item in tree_leaves(value) if isinstance(item, Tensor)]
