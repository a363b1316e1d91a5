"""Layers that take several arguments: the partitions of a :class:`gpipe_bench.engine.pipe.Pipe`."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

__all__ = ["Arguments", "PipeSequential", "opened", "run_layers"]


class Arguments(NamedTuple):
    """What a caller hands to the first layer.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class PipeSequential(nn.Sequential):
    """An ``nn.Sequential`` whose layers may take several inputs.

    ``PipeSequential(a, b)(x, y)`` is ``b(*a(x, y))`` where a gives a tuple, and ``b(a(x, y))`` where it gives anything
    else. Keyword arguments go to the first layer.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the layers one after the other."""
        value: Any = inputs
        for layer in self:
            value = layer(*value, **kwargs) if isinstance(value, tuple) else layer(value)
            kwargs = {}
        return value


def opened(layer: nn.Module) -> nn.Module:
    """A plain ``nn.Sequential`` as a :class:`PipeSequential`; any other layer as it is.

    Both are one module with two classes: they share parameters, hooks and flags, now and later.
    """
    if type(layer) is not nn.Sequential:
        return layer
    twin = PipeSequential.__new__(PipeSequential)
    twin.__dict__ = layer.__dict__
    return twin


def run_layers(layers: nn.Sequential, value: Any) -> Any:
    """Run a partition on what the one before gave, or on the :class:`Arguments` of a batch."""
    if not isinstance(layers, PipeSequential):
        return layers(value)
    if isinstance(value, Arguments):
        return layers(*value.args, **value.kwargs)
    return layers(*value) if isinstance(value, tuple) else layers(value)
