"""Runs the layers of a model one after the other for a profiler, and leaves the model as it is.

A copy of each layer runs in training mode on inputs without the graph of the layer before. Forward and backward passes
of one layer can therefore be repeated, and only two layers must fit on the device together. Parameters, buffers,
gradients, flags and random state of the model do not change.

A stashed skip is one more output of its layer; a popped or peeked skip is one more input.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.autograd.dispatch_mode import tensors_in
from gpipe_bench.balance.sample import Sample, takes_several_inputs
from gpipe_bench.engine.placed import taken_out
from gpipe_bench.skip import Skippable
from gpipe_bench.skip.namespace import SkipKey
from gpipe_bench.skip.tracker import current_tracker, use_tracker
from gpipe_bench.skip.trees import tree_map_only

Skips = dict[SkipKey, Tensor | None]


class _Enter(torch.autograd.Function):
    """Gives a tensor that requires a gradient, by an edge to an empty tensor (a phony) and not to its input.

    The input itself as a leaf would not do: no layer could change it in place, and the graph would keep it.
    """

    @staticmethod
    def forward(_ctx: Any, _phony: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_ctx: Any, _grad: Tensor) -> tuple[None, None]:
        return None, None


def _carry(x: Tensor) -> Tensor:
    """``x`` without its graph; it requires a gradient if ``x`` does."""
    return x.detach().requires_grad_(x.requires_grad)


class _Idle(nn.Module):
    """Gives what it is given, with the skips that it reads."""

    def __init__(self, read: Iterable[SkipKey]) -> None:
        super().__init__()
        self.read = list(read)

    def forward(self, *inputs: object) -> tuple[object, ...]:
        tracker = current_tracker()
        return (*inputs, *(tracker.peek(key) for key in self.read))


class Stage:
    """One layer of a model, which can run any number of times; it also is the tracker of the layer's skips.

    Attributes:
        layer: a copy of the layer, on the device.
        inputs: what the layer before gave; may be set to None after the last run.
        output: what the last run gave.
        stashed: the skips that the last run stashed.
        read: keys of the skips that the layer takes from earlier layers.
    """

    def __init__(self, name: str, layer: nn.Module, inputs: object, skips: Skips, *, several: bool) -> None:
        self.layer = layer
        self.inputs: object = inputs
        self.output: object = None
        self.stashed: Skips = {}
        self.read: set[SkipKey] = set()
        self._name = name
        self._skips = skips
        self._several = several
        # Of the inputs of the last run that need a gradient.
        self._phonies: list[Tensor] = []

    def forward(self) -> None:
        """Run the layer."""
        self.stashed, self._phonies = {}, []
        with _blame(self._name), use_tracker(self):
            inputs = tree_map_only(Tensor, self._enter, self.inputs)
            self.output = self.layer(*inputs) if self._several and isinstance(inputs, tuple) else self.layer(inputs)

    def roots(self) -> list[Tensor]:
        """The tensors from which the backward pass of the last run starts."""
        return [tensor for tensor in tensors_in([self.output, *self.stashed.values()]) if tensor.requires_grad]

    def _enter(self, x: Tensor) -> Tensor:
        """``x`` as the input of a layer, sharing its memory."""
        if not x.requires_grad:
            return x.detach()
        self._phonies.append(torch.empty(0, device=x.device, requires_grad=True))
        entered: Tensor = _Enter.apply(self._phonies[-1], x.detach())  # type: ignore[no-untyped-call, unused-ignore]  # PyTorch leaves it untyped
        return entered

    def backward(self, gradients: Sequence[Tensor]) -> None:
        """Run the backward pass of the last run from the gradients of its roots; they add up in the copy."""
        with _blame(self._name):
            torch.autograd.backward(self.roots(), gradients)

    def backward_inputs(self, gradients: Sequence[Tensor]) -> None:
        """Run as much of it as the gradients of the inputs need."""
        if self._phonies:
            with _blame(self._name):
                torch.autograd.backward(self.roots(), gradients, inputs=self._phonies)

    def idle(self) -> Stage:
        """A stage with the inputs and skips of this one, whose layer does nothing; call it after a first run."""
        return Stage(self._name, _Idle(self.read), self.inputs, self._skips, several=self._several)

    def finish(self, later: AbstractSet[SkipKey]) -> tuple[object, Skips]:
        """Drop the last run, and give what the next layer takes: its input, and skips that ``later`` layers read."""
        passed = {key: value for key, value in self._skips.items() if key in later}
        passed |= {key: None if value is None else _carry(value) for key, value in self.stashed.items() if key in later}
        output = tree_map_only(Tensor, _carry, self.output)
        self.inputs = self.output = None
        self.stashed = {}
        self._skips = {}
        return output, passed

    def save(self, key: SkipKey, value: Tensor | None) -> None:
        """Take a skip that the layer stashes."""
        self.stashed[key] = value

    def load(self, key: SkipKey) -> Tensor | None:
        """Give the layer a skip, and keep it for the next run if it is from an earlier layer."""
        return self.stashed.pop(key) if key in self.stashed else self.peek(key)

    def peek(self, key: SkipKey) -> Tensor | None:
        """Give the layer a skip, and keep it."""
        if key in self.stashed:
            return self.stashed[key]
        self.read.add(key)
        value = self._skips[key]
        return None if value is None else self._enter(value)

    def leave(self, key: SkipKey) -> None:
        """Nothing: skips go when the stage is finished."""


def stages(module: nn.Sequential, sample: Sample, device: torch.device) -> Iterator[Stage]:
    """Each layer of ``module`` as a stage; the caller runs a stage at least once before it takes the next."""
    stage: Stage | None = None
    several = takes_several_inputs(module)
    readers = {
        key: position
        for position, layer in enumerate(module)
        for each in layer.modules()
        if isinstance(each, Skippable)
        for key in (*each.pops(), *each.peeks())
    }
    for position, layer in enumerate(module):
        name = f"layer {position} ({type(layer).__name__})"
        with _blame(name):
            twin = copy.deepcopy(layer).to(device)
            twin = taken_out(twin) if several else twin
        twin.zero_grad(set_to_none=True)
        if not module.training:
            twin.train()
        if stage is None:
            entering = tree_map_only(Tensor, lambda x: _carry(x.clone().to(device)), sample)
            stage = Stage(name, twin, entering, {}, several=several)
        else:
            later = {key for key, reader in readers.items() if reader >= position}
            stage = Stage(name, twin, *stage.finish(later), several=several)
        yield stage


@contextmanager
def _blame(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"while profiling a copy of {name}")
        raise


@contextmanager
def sandbox(device: torch.device) -> Iterator[None]:
    """Gradients on, inference mode off, and PyTorch's random state restored at the end."""
    on_host = device.type in ("cpu", "meta")
    devices, kind = ([], "cuda") if on_host else ([device.index], device.type)
    with torch.random.fork_rng(devices, device_type=kind), torch.inference_mode(False), torch.enable_grad():
        yield
