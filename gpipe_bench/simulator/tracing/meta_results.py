"""Runs operations on the meta device, each with given operands once.

PyTorch computes many shapes in Python, which takes half of the time to trace a model. So results are remembered as
specs. Elementwise operations and batch norms of contiguous tensors are plain to see, and PyTorch is not asked at all.
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

from gpipe_bench.simulator.tracing.specs import TensorSpec, flat, map_specs

_aten: Final = torch.ops.aten
_PRECISE: Final = (torch.float32, torch.float64)
_ELEMENTWISE: Final = frozenset(
    {
        _aten.add.Tensor,
        _aten.leaky_relu.default,
        _aten.leaky_relu_backward.default,
        _aten.mul.Tensor,
        _aten.relu.default,
        _aten.threshold_backward.default,
    }
)
_Number = bool | int | float
_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_EXACT: Final = frozenset(_PLAIN)
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
    plain = plain_result(func, args, kwargs)
    if plain is not None:
        return plain
    copies, named = _copied(args), _copied(kwargs)
    result = _elsewhere(func, copies, named)
    if func is _aten.convolution.default:
        result = _like_operands(result, copies[:2])
    return _recipe(result, {_key_of(tensor.untyped_storage()) for tensor in _tensors([copies, named])})


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
    if func.is_view or func._schema.is_mutable:  # noqa: SLF001 - what PyTorch declares of the operation
        return None
    try:
        return func, _plain(args), _plain([*kwargs.items()])
    except TypeError:
        return None


def _plain(value: Any) -> Hashable:
    if type(value) in _EXACT:
        # 1, 1.0 and True are equal, but operations tell them apart.
        return type(value), value
    if isinstance(value, Tensor):
        if value.device.type != "meta" or value.layout is not torch.strided:
            raise TypeError
        return value.shape, value.stride(), value.dtype, value.is_conj()
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, _PLAIN):
        return type(value), value
    raise TypeError


def _recipe(result: Any, operands: set[int]) -> Any:
    """The specs of results; None if they share memory with operands or each other, or do not fill their storage."""
    tensors = _tensors(result)
    storages = [tensor.untyped_storage() for tensor in tensors]
    keys = {_key_of(storage) for storage in storages}
    if len(keys) < len(storages) or keys & operands:
        return None
    for tensor, storage in zip(tensors, storages, strict=True):
        full = TensorSpec.of(tensor).empty()
        if full.untyped_storage().nbytes() != storage.nbytes() or tensor.device.type != "meta":
            return None
    return map_specs(TensorSpec.of, result)


def _key_of(storage: torch.UntypedStorage) -> int:
    key: int = storage._cdata  # noqa: SLF001 - what tells storages apart; it has no public name
    return key


def _tensors(value: Any) -> list[Tensor]:
    return [item for item in flat(value) if isinstance(item, Tensor)]


def plain_result(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> TensorSpec | tuple[TensorSpec | None, ...] | None:
    """What an aten overload gives, with shapes in the place of tensors; None where that is not plain to see."""
    if kwargs:
        return None
    if func in _ELEMENTWISE:
        return _common(args)
    if func is _aten.native_batch_norm.default:
        x, *others, training, _, _ = args
        whole, same = _of(x), _of_channels(x, others)
        return (whole, same, same) if training and whole and same else None
    if func is _aten.native_batch_norm_backward.default:
        grad, x, *others, training, _, mask = args
        whole, same = _common([grad, x]), _of_channels(x, others)
        plain = training and whole and same and all(isinstance(value, Tensor) for value in others[-2:])
        return (whole, *(same if wanted else None for wanted in mask[1:])) if plain else None
    return None


def _common(args: Sequence[Any]) -> TensorSpec | None:
    """The shape of all tensors among numbers and tensors on the meta device."""
    if not all(isinstance(value, Tensor | _Number) for value in args):
        return None
    found = {_of(value) for value in args if isinstance(value, Tensor)}
    return found.pop() if len(found) == 1 else None


def _of_channels(x: Tensor, others: Sequence[Tensor | None]) -> TensorSpec | None:
    """The shape of a number for each channel of x, if the others, as far as there are any, have it."""
    whole = _of(x)
    # Of a single value there is no variance.
    if whole is None or len(whole.shape) < 2 or x.numel() <= whole.shape[1]:
        return None
    expected = TensorSpec(whole.shape[1:2], (1,), whole.dtype)
    return expected if all(value is None or _of(value) == expected for value in others) else None


def _of(tensor: Tensor) -> TensorSpec | None:
    """The shape of a contiguous tensor of single or double precision on the meta device; None for others."""
    if not (tensor.is_meta and tensor.layout is torch.strided and tensor.dtype in _PRECISE and tensor.is_contiguous()):
        return None
    shape, steps, step = tuple(tensor.shape), list[int](), 1
    for length in reversed(shape):
        steps.append(step)
        step *= max(length, 1)
    strides = tuple(reversed(steps))
    return TensorSpec(shape, strides, tensor.dtype) if tensor.stride() == strides else None
