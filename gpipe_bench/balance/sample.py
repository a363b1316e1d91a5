"""The sample that a profiler is given, and how it enters the first layer.

    module                                        a layer takes a tuple as        as in
    nn.Sequential                                 one input                       GPipe
    PipeSequential, or an nn.Sequential with a    several inputs, one per item    Pipe
    layer that requires several inputs

Layers whose further inputs are optional, as in ``forward(x, mask=None)``, need a PipeSequential to get them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.autograd.dispatch_mode import tensors_in
from gpipe_bench.autograd.sequential import PipeSequential
from gpipe_bench.engine.pipe import NoChunk, scatter_arguments
from gpipe_bench.engine.placed import WithDevice
from gpipe_bench.errors import UnsupportedError
from gpipe_bench.skip import verify_skippables
from gpipe_bench.skip.trees import tree_map_only

Sample = Tensor | tuple[Any, ...]


def takes_several_inputs(module: nn.Sequential) -> bool:
    """Whether a layer gets the items of a tuple as its inputs, as in ``Pipe``, and not the tuple itself."""
    return isinstance(module, PipeSequential) or _requires_several_inputs(module)


def _requires_several_inputs(module: nn.Sequential) -> bool:
    layers = (inner for layer in module for inner in (layer if type(layer) is nn.Sequential else [layer]))
    return any(_required_inputs(layer) > 1 for layer in layers)


def _required_inputs(layer: nn.Module) -> int:
    """How many positional arguments ``forward`` cannot do without."""
    try:
        signature = inspect.signature((layer.module if isinstance(layer, WithDevice) else layer).forward)
    except (TypeError, ValueError):  # of a forward that is not written in Python
        return 1
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return sum(item.kind in kinds and item.default is item.empty for item in signature.parameters.values())


def check_model(module: object, sample: object) -> None:
    """Check what every profiler is given.

    Raises:
        TypeError: ``module`` is no ``nn.Sequential``, its skips do not match, or ``sample`` is not what it takes.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be an nn.Sequential, got {type(module).__name__}; wrap its layers in one")
    if not takes_several_inputs(module):
        _check_tensors(sample)
    elif not any(isinstance(value, Tensor) for value in (sample if isinstance(sample, tuple) else (sample,))):
        raise TypeError(
            "sample must be a Tensor, or a tuple of inputs with at least one Tensor to split, got "
            f"{_kinds(sample)}; pass a batch as Pipe takes it"
        )
    verify_skippables(module)


def check_one_input(module: nn.Sequential, sample: object) -> None:
    """Check that each layer takes one input, and that a sample has nothing but tensors.

    Raises:
        TypeError: a layer requires several inputs, or the sample has something else.
    """
    if _requires_several_inputs(module):
        raise TypeError(
            "module must have layers of one input to be simulated, got a layer that requires several; use "
            "balance_by_time or balance_by_size"
        )
    _check_tensors(sample)


def _check_tensors(sample: object) -> None:
    values = sample if isinstance(sample, tuple) else (sample,)
    if not values or not all(isinstance(value, Tensor) for value in values):
        raise TypeError(
            f"sample must be a Tensor or a tuple of Tensors, got {_kinds(sample)}; pass a batch as the model takes it "
            "(layers of a PipeSequential take other inputs, too)"
        )


def _kinds(sample: object) -> str:
    values = sample if isinstance(sample, tuple) else (sample,)
    return ", ".join(type(value).__name__ for value in values) or "an empty tuple"


def whole_batch(sample: Sample) -> Sample:
    """The sample as the first layer takes it: tensors without their :class:`NoChunk`."""
    if isinstance(sample, Tensor):
        return sample
    return tuple(value.tensor if isinstance(value, NoChunk) else value for value in sample)


def first_microbatch(module: nn.Sequential, sample: Sample, chunks: int) -> Sample:
    """The first of ``chunks`` micro-batches of a sample, split as ``GPipe`` or ``Pipe`` does.

    Raises:
        ValueError: a tensor that is split has no batch dimension, or tensors give different numbers of micro-batches.
    """
    several = takes_several_inputs(module)
    values = sample if isinstance(sample, tuple) else (sample,)
    if any(isinstance(value, Tensor) and value.dim() == 0 for value in values):
        advice = "add the dimension, or wrap the tensor in NoChunk" if several else "add the dimension"
        raise ValueError(f"sample must have the mini-batch as its first dimension, got a scalar; {advice}")
    if several:
        microbatch = scatter_arguments(values, {}, chunks)[0].unwrap()
        return tuple(microbatch.args)
    piece: Sample = tree_map_only(Tensor, lambda tensor: tensor.chunk(chunks)[0], sample)
    return piece


def device_of(sample: Sample, device: torch.device | str | int | None) -> torch.device:
    """The device to profile on, with its index: ``device``, or that of the sample.

    Raises:
        UnsupportedError: this machine has no such device.
    """
    if device is None:
        return next(tensors_in(sample)).device
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        # A build without CUDA says so by an AssertionError.
        reason = str(error).partition("\n")[0]
        raise UnsupportedError(
            f"device must be one that this machine has, got {device!r}: {reason}; use 'cpu'"
        ) from error
