"""The same skips for everybody: layers of this project inside other pipelines, and stages that hand skips on.

torchgpipe and fairscale have skips of their own; a layer made for this project is driven by :func:`translated`, which
yields their ``stash`` and ``pop`` instead. torch.distributed.pipelining has none: there a :class:`Stage` takes and
gives skips as further tensors beside its input and output, which is what a user of it would write. :func:`carried` does
so for each layer.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe_bench.skip import Skippable, stash
from gpipe_bench.skip.tracker import LocalTracker, use_tracker


def translated(model: nn.Sequential, rival: Any) -> nn.Sequential:
    """``model`` with its skippable layers in the language of ``rival``; a model without any comes back as it is.

    Args:
        model: layers of this project.
        rival: a module with ``skippable``, ``stash`` and ``pop``.
    """
    names = _names(model)
    if not names:
        return model
    return nn.Sequential(*(_adapter(x, names, rival) if isinstance(x, Skippable) else x for x in model))


def _names(model: nn.Sequential) -> dict[Any, str]:
    """A name for every skip of the model, whatever its namespace."""
    keys = [key for layer in model if isinstance(layer, Skippable) for key in (*layer.stashes(), *layer.pops())]
    return {key: f"skip{k}" for k, key in enumerate(dict.fromkeys(keys))}


def _adapter(layer: Any, names: dict[Any, str], rival: Any) -> nn.Module:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> Generator[Any, Any, Any]:
            answer = None
            commands = _commands(layer, x)
            while True:
                try:
                    command = commands.send(answer)
                except StopIteration as stop:
                    return stop.value
                name = names[layer.skip_key(command.name)]
                if isinstance(command, stash):
                    yield rival.stash(name, command.tensor)
                    answer = None
                else:
                    answer = yield rival.pop(name)

    stashes, pops = ([names[key] for key in keys] for keys in (layer.stashes(), layer.pops()))
    made: nn.Module = rival.skippable(stash=stashes, pop=pops)(Adapter)()
    return made


def _commands(layer: Any, x: Any) -> Generator[Any, Any, Any]:
    """What the forward of a skippable layer yields, before anybody carries it out."""
    written = type(layer).forward.__wrapped__
    commands: Generator[Any, Any, Any] = written(layer, x)
    return commands


class Stage(nn.Module):
    """Neighbouring layers that take ``(x, *skips)`` and give ``x``, or ``(x, *skips)`` where skips leave them.

    Args:
        layers: of this stage.
        arriving: keys of the skips that come with the input, in their order.
        leaving: keys of those that go on with the output.
        recompute: how many of the micro-batches of a step are checkpointed: the first ones.
        sent: whether outputs and gradients go to other processes, and so have to be contiguous: PyTorch makes buffers
            with their strides, and gloo refuses those of the slices that ``cat`` gives back as gradients.
    """

    def __init__(
        self, layers: Sequence[nn.Module], arriving: list[Any], leaving: list[Any], recompute: int, *, sent: bool
    ) -> None:
        super().__init__()
        self.sent = sent
        self.layers = nn.ModuleList(layers)
        self.recompute = recompute
        self.calls = 0
        self._arriving, self._leaving = arriving, leaving

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the layers, checkpointed or not."""
        self.calls += 1
        if self.sent and self._arriving:
            tensors = tuple(_sendable(tensor) for tensor in tensors)
        if self.calls <= self.recompute:
            kept: Tensor | tuple[Tensor, ...] = checkpoint(self.run, *tensors, use_reentrant=False)
        else:
            kept = self.run(*tensors)
        if not self.sent:
            return kept
        return tuple(_output(one, tensors) for one in kept) if isinstance(kept, tuple) else _output(kept, tensors)

    def run(self, *tensors: Any) -> Any:
        """Run the layers. Several values between layers are a tuple there, and inputs one by one here."""
        count = len(tensors) - len(self._arriving)
        x: Any = tensors[0] if count == 1 else tensors[:count]
        held = LocalTracker(zip(self._arriving, tensors[count:], strict=True))
        with use_tracker(held):
            for layer in self.layers:
                x = layer(x)
        leaving: list[Any] = [held.load(key) for key in self._leaving]
        return (*(x if isinstance(x, tuple) else (x,)), *leaving) if leaving else x


class _Sendable(torch.autograd.Function):
    """The identity, whose gradient is contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004 - the interface of autograd
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004 - likewise
        return gradient.contiguous()


def _sendable(x: Any) -> Any:
    if x is None:
        return x
    given: Tensor = _Sendable.apply(x)  # type: ignore[no-untyped-call, unused-ignore]  # PyTorch leaves it untyped
    return given


def _output(x: Any, inputs: Sequence[Tensor]) -> Any:
    """``x`` to be sent, and to be detached in place by zero-bubble schedules.

    PyTorch refuses that for views. An input must not be detached: W would recompute a checkpoint without its graph.
    """
    if x is None:
        return x
    copied = x._is_view() or any(x is one for one in inputs)  # noqa: SLF001 - there is no public name
    return x.clone() if copied else x.contiguous()


def make_stages(model: nn.Sequential, balance: Sequence[int], recompute: int = 0, *, sent: bool = False) -> list[Stage]:
    """``model`` cut by ``balance``; the stages after one another compute what it computes.

    Args:
        model: the whole of it.
        balance: layers per stage.
        recompute: see :class:`Stage`.
        sent: likewise.
    """
    bounds = [0, *accumulate(balance)]
    edges = [list(_crossing(model, bound)) for bound in bounds]
    layers = list(model)
    return [
        Stage(layers[a:b], edges[j], edges[j + 1], recompute, sent=sent) for j, (a, b) in enumerate(pairwise(bounds))
    ]


def carried(model: nn.Sequential) -> nn.Sequential:
    """``model`` without skips: each layer takes a tuple of its input and of all skips that pass it, and gives one."""
    return nn.Sequential(*map(_Carrier, make_stages(model, [1] * len(model))))


class _Carrier(nn.Module):
    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, given: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        found: Tensor | tuple[Tensor, ...] = self.stage.run(*(given if isinstance(given, tuple) else (given,)))
        return found


def _crossing(model: nn.Sequential, bound: int) -> Iterator[Any]:
    """Keys of the skips that are stashed before layer ``bound`` and popped at it or later."""
    layers = list(model)
    later = {key for layer in layers[bound:] if isinstance(layer, Skippable) for key in layer.pops()}
    for layer in layers[:bound]:
        if isinstance(layer, Skippable):
            yield from (key for key in layer.stashes() if key in later)
