"""The ``@skippable`` decorator: a layer stashes tensors for later layers, and pops or peeks tensors of earlier layers.

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

torchgpipe (arXiv 2004.09910, section 3.3) introduced stash and pop. A peek reads a stash and leaves it for others. In
torchgpipe a decorated layer is a module around the layer, which renames every parameter. Here the decorator derives a
class from the layer's class, under the same name.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Generator, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, Final, Self, TypeVar, cast

from torch import Tensor, nn

from gpipe_bench.errors import SkipUsageError
from gpipe_bench.skip.namespace import Namespace, SkipKey
from gpipe_bench.skip.tracker import current_tracker
from gpipe_bench.skip.trees import tree_leaves

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_NAMES: Final = ("__module__", "__qualname__", "__doc__", "__firstlineno__")
"""What a class is found by, in pickles and in sources."""


@dataclass(frozen=True, slots=True, eq=False)
class stash:  # noqa: N801 - reads as a statement: `yield stash(name, tensor)`
    """Stashes a tensor, which a later layer pops by its name: ``yield stash(name, tensor)``.

    Args:
        name: a name that the layer declares as ``stash``.
        tensor: a tensor of shape (micro-batch size, ...), or None.
    """

    name: str
    tensor: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class pop:  # noqa: N801 - reads as a statement: `tensor = yield pop(name)`
    """Pops a tensor that an earlier layer stashed: ``tensor = yield pop(name)``.

    Args:
        name: a name that the layer declares as ``pop``.
    """

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class peek:  # noqa: N801 - reads as a statement: `tensor = yield peek(name)`
    """Reads a tensor that an earlier layer stashed, and leaves it for later layers: ``tensor = yield peek(name)``.

    Args:
        name: a name that the layer declares as ``peek``.
    """

    name: str


class Skippable:
    """Base class of the classes that :func:`skippable` gives.

    Attributes:
        stashable_names: skips that the class declares as ``stash``.
        poppable_names: skips that it declares as ``pop``.
        peekable_names: skips that it declares as ``peek``.
    """

    stashable_names: frozenset[str] = frozenset()
    poppable_names: frozenset[str] = frozenset()
    peekable_names: frozenset[str] = frozenset()

    @property
    def skip_names(self) -> frozenset[str]:
        """All skips that the class declares."""
        return self.stashable_names | self.poppable_names | self.peekable_names

    @property
    def _namespaces(self) -> dict[str, Namespace]:
        return cast("dict[str, Namespace]", self.__dict__.setdefault("_skip_namespaces", {}))

    def skip_key(self, name: str) -> SkipKey:
        """The namespace and the name of the skip ``name`` of this layer."""
        return self._namespaces.get(name), name

    def stashes(self) -> list[SkipKey]:
        """Keys of the skips that this layer stashes, by name."""
        return [self.skip_key(name) for name in sorted(self.stashable_names)]

    def pops(self) -> list[SkipKey]:
        """Keys of the skips that this layer pops, by name."""
        return [self.skip_key(name) for name in sorted(self.poppable_names)]

    def peeks(self) -> list[SkipKey]:
        """Keys of the skips that this layer reads and leaves, by name."""
        return [self.skip_key(name) for name in sorted(self.peekable_names)]

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Put skips of this layer into a namespace.

        Args:
            ns: the namespace.
            only: names of the skips; default: all skips of the layer.

        Returns:
            The layer, so that calls can be chained.

        Raises:
            TypeError: ``only`` is a string.
            ValueError: the layer does not declare a name in ``only``.
        """
        declared = self.skip_names
        names = declared if only is None else _names("only", only)
        if names - declared:
            raise ValueError(
                f"only must name skips that {type(self).__name__} declares, got {sorted(names - declared)}; "
                f"choose from {sorted(declared)}"
            )
        self._namespaces.update(dict.fromkeys(names, ns))
        return self

    def _drive(self, commands: Generator[Any, Any, Any]) -> Any:
        """Run the generator of ``forward`` to its end, and carry out what it yields."""
        tracker = current_tracker()
        done: dict[str, set[str]] = {"stash": set(), "pop": set(), "peek": set()}
        answer: Tensor | None = None
        while True:
            try:
                command = commands.send(answer)
            except StopIteration as stop:
                self._check_complete(done)
                for key in self.peeks():
                    tracker.leave(key)
                return stop.value
            answer = None
            if isinstance(command, stash):
                self._note(done, "stash", command.name)
                _check_stash(command.name, command.tensor)
                tracker.save(self.skip_key(command.name), command.tensor)
            elif isinstance(command, pop):
                self._note(done, "pop", command.name)
                answer = tracker.load(self.skip_key(command.name))
            elif isinstance(command, peek):
                self._note(done, "peek", command.name)
                answer = tracker.peek(self.skip_key(command.name))
            else:
                raise TypeError(
                    f"{type(self).__name__}.forward must yield stash(...), pop(...) or peek(...), got {command!r}; "
                    "yield nothing else from a skippable layer"
                )

    def _declared(self) -> dict[str, frozenset[str]]:
        return {"stash": self.stashable_names, "pop": self.poppable_names, "peek": self.peekable_names}

    def _note(self, done: dict[str, set[str]], verb: str, name: str) -> None:
        declared = self._declared()[verb]
        if name not in declared:
            raise SkipUsageError(
                f"{type(self).__name__} must declare every skip it uses, got {verb}({name!r}) with {verb} declared as "
                f"{sorted(declared)}; add {name!r} to @skippable({verb}=[...])"
            )
        done[verb].add(name)

    def _check_complete(self, done: Mapping[str, AbstractSet[str]]) -> None:
        for verb, declared in self._declared().items():
            missing = sorted(declared - done.get(verb, frozenset()))
            if missing:
                raise SkipUsageError(
                    f"{type(self).__name__}.forward must {verb} every skip it declares, got none of {missing}; "
                    f"yield {verb}(...) for it (None is a legal value) or remove it from the declaration"
                )


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = (), peek: Iterable[str] = ()
) -> Callable[[type[ModuleT]], type[ModuleT]]:
    """Declare the skips of a layer class, whose ``forward`` yields them.

    ::

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

        pipe = GPipe(nn.Sequential(Enter(), nn.Linear(8, 8), Leave()), [1, 2], devices=["cuda:0", "cuda:1"])

    Each skip has one layer that stashes it, and one or more later layers that read it: any number of layers peek, and
    the last reader may pop. The layers also run in a plain ``nn.Sequential``. ``forward`` must yield every skip that
    the class declares, and no other.

    A pipeline frees a tensor after its last reader, whether that pops or peeks. A plain ``nn.Sequential`` keeps one
    that is not popped until another one is stashed under its name.

    Args:
        stash: names of the skips that ``forward`` stashes.
        pop: names of the skips that ``forward`` pops.
        peek: names of the skips that ``forward`` reads and leaves.

    Returns:
        A decorator, which derives a new class from the one that it gets, with its name. The class that it gets stays as
        it was, so that one class can be decorated several times, for skips of other names. Methods call ``super()``
        without arguments: to ``super(Enter, self)``, ``Enter`` would be the new class.

    Raises:
        TypeError: ``stash``, ``pop`` or ``peek`` is a string.
    """
    stashable, poppable, peekable = _names("stash", stash), _names("pop", pop), _names("peek", peek)

    def decorate(module_cls: type[ModuleT]) -> type[ModuleT]:
        # Of a class that is decorated already, new names take the place of the old ones.
        plain_forward: Callable[..., Any] = getattr(module_cls.forward, "undriven", module_cls.forward)

        @functools.wraps(plain_forward)
        def forward(self: Skippable, *args: Any, **kwargs: Any) -> Any:
            result = plain_forward(self, *args, **kwargs)
            if isinstance(result, GeneratorType):
                return self._drive(result)
            self._check_complete({})
            return result

        forward.undriven = plain_forward  # type: ignore[attr-defined]  # functions take attributes
        bases = (module_cls,) if issubclass(module_cls, Skippable) else (module_cls, Skippable)
        body = {name: vars(module_cls)[name] for name in _NAMES if name in vars(module_cls)}
        body |= {"stashable_names": stashable, "poppable_names": poppable, "peekable_names": peekable}
        body |= {"_decorated": (module_cls, stashable, poppable, peekable), "__reduce_ex__": _reduce}
        body["forward"] = forward
        return types.new_class(module_cls.__name__, bases, exec_body=lambda namespace: namespace.update(body))

    return decorate


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle an object whose class is not found under its name by the class that was decorated."""
    reduced = nn.Module.__reduce_ex__(self, protocol)
    kind: Any = type(self)
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is kind or "_decorated" not in vars(kind):
        return reduced
    return _blank, vars(kind)["_decorated"], *reduced[2:]


@functools.cache
def _derived(module_cls: type[nn.Module], *names: frozenset[str]) -> type[nn.Module]:
    return skippable(*names)(module_cls)


def _blank(*decorated: Any) -> nn.Module:
    """An object without attributes, of a class that is derived anew."""
    kind = _derived(*decorated)
    return kind.__new__(kind)


def isolate(module: ModuleT, ns: Namespace, *, only: Iterable[str] | None = None) -> ModuleT:
    """Put skips of all skippable layers in ``module`` into a namespace; :meth:`Skippable.isolate` does it for one.

    Args:
        module: a module with skippable layers, or one of them.
        ns: the namespace.
        only: names of the skips; default: all skips of the layers.

    Returns:
        ``module``.

    Raises:
        TypeError: ``only`` is a string.
        ValueError: no layer declares a name in ``only``.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, Skippable)]
    declared = frozenset().union(*(layer.skip_names for layer in layers))
    names = declared if only is None else _names("only", only)
    if names - declared:
        raise ValueError(
            f"only must name skips that layers of {type(module).__name__} declare, got {sorted(names - declared)}; "
            f"choose from {sorted(declared)}"
        )
    for layer in layers:
        layer.isolate(ns, only=names & layer.skip_names)
    return module


def _check_stash(name: str, value: Any) -> None:
    """Refuse tensors within another object: they would neither be copied nor get gradients."""
    if not isinstance(value, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        raise TypeError(
            f"a stash must be one tensor or none, got a {type(value).__name__} of tensors for {name!r}; "
            "stash each tensor under a name of its own"
        )


def _names(argument: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"{argument} must be a list of names, got the string {names!r}; write [{names!r}]")
    return frozenset(names)
