"""The ``@skippable`` decorator: layers that stash tensors for later layers, and pop those of earlier ones.

    @skippable(stash=["residual"])
    class Enter(nn.Module):
        def forward(self, x):
            yield stash("residual", x)
            return x

    @skippable(pop=["residual"])
    class Leave(nn.Module):
        def forward(self, x):
            residual = yield pop("residual")
            return x + residual

torchgpipe (arXiv 2004.09910, section 3.3) introduced this interface. Here, as with ``dataclass``, the decorated class
is the class itself, so parameter names, checkpoints, pickling and ``super(Enter, self)`` stay as they were. (Refused:
a wrapper module, which renames every parameter; a subclass, which makes ``super(Enter, self)`` call itself for ever.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, Self, TypeVar, cast

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gpipe_bench.engine.skip.namespace import Namespace, SkipKey
from gpipe_bench.engine.skip.tracker import current_tracker
from gpipe_bench.errors import SkipUsageError

__all__ = ["Skippable", "pop", "skippable", "stash"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True, slots=True, eq=False)
class stash:  # noqa: N801 - reads as a statement: `yield stash(name, tensor)`
    """Yielded by a skippable layer: keep ``tensor`` under ``name`` until it is popped. None is legal."""

    name: str
    tensor: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class pop:  # noqa: N801 - reads as a statement: `tensor = yield pop(name)`
    """Yielded by a skippable layer: the value of the ``yield`` is what was stashed under ``name``."""

    name: str


class Skippable:
    """Mixed into every class that :func:`skippable` decorates."""

    stashable_names: frozenset[str] = frozenset()
    poppable_names: frozenset[str] = frozenset()

    @property
    def _namespaces(self) -> dict[str, Namespace]:
        return cast("dict[str, Namespace]", self.__dict__.setdefault("_skip_namespaces", {}))

    def skip_key(self, name: str) -> SkipKey:
        """What identifies the skip ``name`` of this layer in its model."""
        return self._namespaces.get(name), name

    def stashes(self) -> list[SkipKey]:
        """Keys of the skips that this layer stashes, by name."""
        return [self.skip_key(name) for name in sorted(self.stashable_names)]

    def pops(self) -> list[SkipKey]:
        """Keys of the skips that this layer pops, by name."""
        return [self.skip_key(name) for name in sorted(self.poppable_names)]

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Put skips of this layer into a namespace; returns the layer, so that calls chain.

        Args:
            ns: the namespace.
            only: names to isolate; all by default.

        Raises:
            ValueError: a name in ``only`` that the layer does not declare.
        """
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else _names("only", only)
        if names - declared:
            raise ValueError(
                f"only must name skips that {type(self).__name__} declares, got {sorted(names - declared)}; "
                f"choose from {sorted(declared)}"
            )
        self._namespaces.update(dict.fromkeys(names, ns))
        return self

    def _drive(self, commands: Generator[Any, Any, Any]) -> Any:
        """Run a generator forward to its end and carry out what it yields."""
        tracker = current_tracker()
        stashed: set[str] = set()
        popped: set[str] = set()
        answer: Tensor | None = None
        while True:
            try:
                command = commands.send(answer)
            except StopIteration as stop:
                self._check_complete(stashed, popped)
                return stop.value
            answer = None
            if isinstance(command, stash):
                self._check_declared("stash", command.name, self.stashable_names)
                _check_stash(command.name, command.tensor)
                stashed.add(command.name)
                tracker.save(self.skip_key(command.name), command.tensor)
            elif isinstance(command, pop):
                self._check_declared("pop", command.name, self.poppable_names)
                popped.add(command.name)
                answer = tracker.load(self.skip_key(command.name))
            else:
                raise TypeError(
                    f"{type(self).__name__}.forward must yield stash(...) or pop(...), got {command!r}; "
                    "yield nothing else from a skippable layer"
                )

    def _check_declared(self, verb: str, name: str, declared: frozenset[str]) -> None:
        if name not in declared:
            raise SkipUsageError(
                f"{type(self).__name__} must declare every skip it uses, got {verb}({name!r}) with {verb} declared as "
                f"{sorted(declared)}; add {name!r} to @skippable({verb}=[...])"
            )

    def _check_complete(self, stashed: set[str], popped: set[str]) -> None:
        for verb, declared, done in (("stash", self.stashable_names, stashed), ("pop", self.poppable_names, popped)):
            missing = sorted(declared - done)
            if missing:
                raise SkipUsageError(
                    f"{type(self).__name__}.forward must {verb} every skip it declares, got none of {missing}; "
                    f"yield {verb}(...) for it (None is a legal value) or remove it from the declaration"
                )


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[ModuleT]], type[ModuleT]]:
    """Declare the skips of a layer class; see the module's example.

    Args:
        stash: names of skips that ``forward`` stashes.
        pop: names of skips that it pops.

    Raises:
        TypeError: a bare string where a list of names belongs.
    """
    stashable, poppable = _names("stash", stash), _names("pop", pop)

    def decorate(module_cls: type[ModuleT]) -> type[ModuleT]:
        if module_cls.__module__.startswith("torch."):
            raise TypeError(f"skippable must decorate a class of yours, got {module_cls!r}; derive one from it first")
        plain_forward: Callable[..., Any] = module_cls.forward

        @functools.wraps(plain_forward)
        def forward(self: Skippable, *args: Any, **kwargs: Any) -> Any:
            result = plain_forward(self, *args, **kwargs)
            if isinstance(result, GeneratorType):
                return self._drive(result)
            self._check_complete(set(), set())
            return result

        if not issubclass(module_cls, Skippable):
            module_cls.__bases__ += (Skippable,)
        for name, value in {"stashable_names": stashable, "poppable_names": poppable, "forward": forward}.items():
            setattr(module_cls, name, value)
        return module_cls

    return decorate


def isolate(module: ModuleT, ns: Namespace, *, only: Iterable[str] | None = None) -> ModuleT:
    """Put skips of all skippable layers in ``module`` into a namespace, as :meth:`Skippable.isolate` does for one.

    Args:
        module: a skippable layer, or layers among which skips begin and end.
        ns: the namespace.
        only: names to isolate; all by default.

    Returns:
        ``module``.

    Raises:
        ValueError: a name in ``only`` that no layer declares.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, Skippable)]
    declared = frozenset().union(*(layer.stashable_names | layer.poppable_names for layer in layers))
    names = declared if only is None else _names("only", only)
    if names - declared:
        raise ValueError(
            f"only must name skips that layers of {type(module).__name__} declare, got {sorted(names - declared)}; "
            f"choose from {sorted(declared)}"
        )
    for layer in layers:
        layer.isolate(ns, only=names & (layer.stashable_names | layer.poppable_names))
    return module


def _check_stash(name: str, value: Any) -> None:
    """Refuse tensors within something else: they would neither be copied nor get gradients."""
    if not isinstance(value, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        raise TypeError(
            f"a stash must be one tensor or none, got a {type(value).__name__} of tensors for {name!r}; "
            "stash each tensor under a name of its own"
        )


def _names(argument: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"{argument} must be a list of names, got the string {names!r}; write [{names!r}]")
    return frozenset(names)
