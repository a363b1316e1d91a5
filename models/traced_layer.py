"""One layer of a network that was cut up: a straight line of calls, and the parts of the network that it calls.

    pop skips ─ step ─ step ─ ... ─ stash skips        tensors for the next layer come in and go out beside them

The parts keep the names that they have in the whole network, below the layer: ``blocks_0.blocks.0.attn.qkv.weight``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx.node import map_aggregate

from gpipe_bench.skip import Skippable, pop, skippable, stash


@dataclass(frozen=True, slots=True)
class Ref:
    """A value by its name."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Own:
    """A part of the layer by its path: a submodule, a parameter or a buffer."""

    path: str

    def __repr__(self) -> str:
        return f"self.{self.path}"


@dataclass(frozen=True, slots=True)
class Step:
    """One call.

    Attributes:
        name: of its result.
        call: a part of the layer, a function, or the name of a method of the first argument.
        args: positional arguments, with :class:`Ref` and :class:`Own` in place of values.
        kwargs: keyword arguments, likewise.
        drop: values that nobody needs afterwards.
    """

    name: str
    call: Own | Callable[..., Any] | str
    args: Any
    kwargs: Any
    drop: tuple[str, ...] = ()

    def __str__(self) -> str:
        call = self.call if isinstance(self.call, str | Own) else getattr(self.call, "__name__", repr(self.call))
        given = [repr(arg) for arg in self.args] + [f"{key}={arg!r}" for key, arg in self.kwargs.items()]
        return f"{self.name} = {call}({', '.join(given)})"


@dataclass(frozen=True, slots=True)
class Program:
    """What a layer does.

    Attributes:
        receives: names of the values that the layer before gives; a single one comes without a tuple.
        pops: skip name -> name of the value here.
        steps: calls in order.
        stashes: skip name -> name of the value here.
        gives: the output, with :class:`Ref` in place of values.
    """

    receives: tuple[str, ...]
    pops: Mapping[str, str]
    steps: tuple[Step, ...]
    stashes: Mapping[str, str]
    gives: Any


@skippable()
class TracedLayer(nn.Module, Skippable):
    """Runs a program.

    Args:
        program: what to run; the skips that it pops and stashes are declared by it.
        parts: path -> submodule, parameter or buffer that it calls, or that only belongs to its state.
        transient: paths of buffers that are not part of the state.
    """

    def __init__(self, program: Program, parts: Mapping[str, nn.Module | Tensor], transient: Iterable[str]) -> None:
        super().__init__()
        self._program = program
        # Unlike in a handwritten layer, every instance has names of its own.
        self.stashable_names = frozenset(program.stashes)
        self.poppable_names = frozenset(program.pops)
        transient = set(transient)
        for path in sorted(parts, key=lambda path: path.count(".")):
            _attach(self, path, parts[path], persistent=path not in transient)

    def forward(self, *received: Any) -> Generator[Any, Any, Any]:
        """Run the program on what the layer before gave: a tensor, a tuple of them, or several, of any shapes."""
        program = self._program
        if len(program.receives) > 1 and len(received) == 1:
            (received,) = received
        values: dict[str, Any] = dict(zip(program.receives, received, strict=True))
        del received
        for skip, name in program.pops.items():
            values[name] = yield pop(skip)
        for step in program.steps:
            args, kwargs = self._filled(step.args, values), self._filled(step.kwargs, values)
            if isinstance(step.call, str):
                values[step.name] = getattr(args[0], step.call)(*args[1:], **kwargs)
            else:
                call = _part(self, step.call.path) if isinstance(step.call, Own) else step.call
                values[step.name] = call(*args, **kwargs)
            del args, kwargs
            for name in step.drop:
                del values[name]
        for skip, name in program.stashes.items():
            yield stash(skip, values[name])
        return self._filled(program.gives, values)

    def extra_repr(self) -> str:
        """The program, a line per call."""
        return "\n".join(map(str, self._program.steps))

    def _filled(self, value: Any, values: Mapping[str, Any]) -> Any:
        def found(one: Any) -> Any:
            if type(one) is Ref:
                return values[one.name]
            return _part(self, one.path) if type(one) is Own else one

        return map_aggregate(value, found)


def _part(root: nn.Module, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), root)


def _attach(layer: nn.Module, path: str, part: nn.Module | Tensor, *, persistent: bool) -> None:
    """Put a part where ``path`` says, unless a part that holds it is there already."""
    *folders, last = path.split(".")
    place = layer
    for folder in folders:
        if getattr(place, folder, None) is None:
            place.add_module(folder, nn.Module())
        place = getattr(place, folder)
    if getattr(place, last, None) is not None:
        return
    if isinstance(part, nn.Module):
        place.add_module(last, part)
    elif isinstance(part, nn.Parameter):
        place.register_parameter(last, part)
    else:
        place.register_buffer(last, part, persistent=persistent)
