"""Which kernels an aten operation launches, by what it reads, writes and computes.

FLOPs come from PyTorch's own formulas (``torch.utils.flop_counter``), bytes from the operands: each is read once and
each result written once, unless a table knows better. Views and allocations launch nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.flop_counter import conv_flop_count, flop_registry

from gpipe_bench.kernels.attention import AttentionCall
from gpipe_bench.kernels.call import Call, Convolution
from gpipe_bench.kernels.kernel import FOREACH, Kernel
from gpipe_bench.kernels.parts import parts_of
from gpipe_bench.kernels.roofline import whole_of

_aten: Final = torch.ops.aten

# Operations that only reserve memory, or relabel it in a way that PyTorch does not declare as a view.
_FREE_OF_CHARGE: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach", "lift_fresh"}
)
# What they overwrite is not read.
_WRITE_ONLY: Final = frozenset(
    {"fill_", "zero_", "copy_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_"}
)
# Their backward passes are given the input for its shape alone.
_SHAPE_ONLY: Final = frozenset({"avg_pool2d_backward", "max_pool2d_with_indices_backward"})


def kernels_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[Kernel]:
    """Kernels that a call of an aten overload launches, by what it was called with and what it gave."""
    return [
        Kernel(call.name, call.dtype, call.launches, whole_of(call), parts_of(call))
        for call in _calls(func, args, kwargs, result)
    ]


def _calls(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[Call]:
    """The operations of the device that a call consists of."""
    name = func.overloadpacket.__name__
    if name in _FREE_OF_CHARGE or func.is_view:
        return []
    if func is _aten.convolution.default:
        return [_convolution(args, result)]
    if func is _aten.convolution_backward.default:
        return _convolution_backward(args, result)
    # An operation in place on many tensors gives nothing.
    results = tensors_of(args[0] if result is None and args else result)
    call = Call(name, args, _used(name, args, kwargs), results)
    if func.namespace == "gpipe_bench" and name.startswith("recurrence"):
        rows = results[0].numel() // results[0].shape[-1]
        return [call._replace(flop=2 * rows * call.operands[-1].numel(), moments=args[-1])]
    if func.overloadpacket in flop_registry:
        flop = int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
        attention = AttentionCall.of(func, args, kwargs) if "attention" in name else None
        # A product of complex numbers is four of real ones.
        flop *= 4 if results and results[0].is_complex() else 1
        call = call._replace(flop=attention.unmasked(flop) if attention else flop, attention=attention)
    return [call] if call.read or call.written else []


def tensors_of(value: object) -> list[Tensor]:
    """The strided tensors in (lists and tuples of) arguments or results."""
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided else []
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def _used(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The operands that are read, each once: x * x reads x once."""
    operands = tensors_of([*args[name.removeprefix(FOREACH) in _WRITE_ONLY :], *kwargs.values()])
    if name in _SHAPE_ONLY:
        operands = operands[:1] + operands[2:]
    return list({id(tensor): tensor for tensor in operands}.values())


def _convolution(args: Sequence[Any], result: Tensor) -> Call:
    operands = tensors_of(args[:3])
    # (input, weight, bias, stride, padding, dilation, transposed, output padding, groups)
    convolution = Convolution("forward", args[0], result, args[1], args[3], args[5], args[6], args[8], args[:1])
    return Call("convolution", args, operands, [result], _flop(convolution), convolution)


def _convolution_backward(args: Sequence[Any], result: Sequence[Tensor | None]) -> list[Call]:
    """The gradient of the data, that of the weight and that of the bias, as far as asked."""
    grad, x, weight = args[:3]
    of_data, of_weight, of_bias = result
    # (grad, input, weight, bias sizes, stride, padding, dilation, transposed, output padding, groups, ...)
    both = Convolution("data", x, grad, weight, args[4], args[6], args[7], args[9], (grad, x))
    # Each takes as many products as the forward pass. PyTorch's own count of them leaves groups out.
    flop, calls, name = _flop(both), list[Call](), "convolution_backward"
    if of_data is not None:
        calls.append(Call(f"{name}_data", args, [grad, weight], [of_data], flop, both))
    if of_weight is not None:
        # Both use the same copies.
        one = both._replace(direction="weight", dense=() if calls else both.dense)
        calls.append(Call(f"{name}_weight", args, [grad, x], [of_weight], flop, one))
    if of_bias is not None:
        calls.append(Call(f"{name}_bias", args, [grad], [of_bias]))
    return calls


def _flop(convolution: Convolution) -> int:
    x, weight, y = (list(tensor.shape) for tensor in (convolution.x, convolution.weight, convolution.y))
    return int(conv_flop_count(x, weight, y, transposed=convolution.transposed))
