"""Random numbers of one task from generators of its own.

PyTorch has one default generator per device, shared by all threads. When workers on the CPU draw from it at the same
time, who gets which number is a race: a run could not be repeated, and a recomputation could not find its dropout
masks again. Within :class:`Redirect`, whatever a thread draws comes from generators that belong to the task.
"""

from __future__ import annotations

import functools
import threading
from traceback import walk_stack
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch import Tensor

from gpipe_bench.autograd.dispatch_mode import DispatchMode
from gpipe_bench.engine.partition import TASK
from gpipe_bench.errors import RandomnessError

lending: Final = threading.RLock()
"""Held while an operator has the default generator on loan."""


class Loans:
    """Counts, under the lock, what could disturb each other.

    Attributes:
        bare: tasks that run without a redirect, beside other tasks. They would draw from the default generator.
        made: how often the default generator was on loan, and numbers were drawn from it.
    """

    bare = made = 0


_CHECKPOINT = torch.utils.checkpoint.__file__
# Those of PyTorch, whose operators are tagged if they draw. Collectives wait for others, so they must hold no lock.
_TAGGED = {"aten", "prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that PyTorch uses on ``device`` unless told otherwise."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generators = module.default_generators
    if not generators:
        module.init()
        generators = module.default_generators
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = generators[index]
    return generator


class Redirect(DispatchMode):
    """Lets every random operator of this thread draw from generators seeded for one task.

    Args:
        seed: the task's; equal seeds and operators give equal numbers, on one device type.
        keep: device type whose random operators draw as ever.
        nested: whether the task belongs to a pipeline in a layer of another one.

    Attributes:
        drew: whether random numbers were drawn, other than those of ``keep``.
        lent: whether an operator drew while it had a default generator on loan.
        disturbed: whether a task that could draw from the default generator ran meanwhile.

    Raises:
        RandomnessError: a number is drawn where somebody else will want to draw it again, without the generators of
            the task: within PyTorch's own checkpoint, or in a pipeline in a layer of another one.
    """

    def __init__(self, seed: int, keep: str | None = None, *, nested: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in PyTorch
        self._seed = seed
        self._keep = keep
        self._nested = nested
        self._generators: dict[torch.device, torch.Generator] = {}
        self.drew = self.lent = self.disturbed = False

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``; if it is random, with the task's generator."""
        if not _may_draw(func):
            return func(*args, **kwargs)
        if not _is_random(func):
            # Nobody knows what it does inside, so its numbers on the CPU are the task's whatever its tensors are on.
            return self._lent(torch.device("cpu"), func, args, kwargs)
        device = _device_of(args, kwargs)
        if device.type == self._keep or _drops_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        func = _with_generator(func)
        names = _argument_names(func)
        if "generator" not in names:
            return self._lent(device, func, args, kwargs)
        named = dict(zip(names, args, strict=False), **kwargs)
        given = named.get("generator")
        if given is not None and _address(given) != _address(default_generator(device)):
            return func(*args, **kwargs)
        self._draw()
        index = min(names.index("generator"), len(args))
        rest = dict(zip(names[index:], args[index:], strict=False)) | kwargs
        return func(*args[:index], **{**rest, "generator": self._generator(device)})

    def _draw(self) -> None:
        self.drew = True
        _check_drawn_once(nested=self._nested)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def _lent(self, device: torch.device, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that knows only the default generator, which gets the task's state for as long."""
        own, shared = self._generator(device), default_generator(device)
        with lending:
            before, lent = shared.get_state(), own.get_state()
            shared.set_state(lent)
            try:
                return func(*args, **kwargs)
            finally:
                own.set_state(shared.get_state())
                shared.set_state(before)
                if not torch.equal(own.get_state(), lent):
                    Loans.made += 1
                    self.lent = True
                    self.disturbed |= Loans.bare > 0
                    self._draw()


def _check_drawn_once(*, nested: bool) -> None:
    """Refuse a number that somebody else will want to draw again."""
    if nested:
        raise RandomnessError(_refusal("a pipeline", "make its layers partitions of the outer one"))
    # torch.utils.checkpoint puts back the default generator and no other one (pytorch#14253): gradients would be wrong.
    for frame, _ in walk_stack(None):
        if frame.f_code.co_filename == _CHECKPOINT:
            raise RandomnessError(_refusal("torch.utils.checkpoint", "let the pipeline checkpoint instead"))
        if frame.f_code is TASK:
            return


def _refusal(got: str, advice: str) -> str:
    return (
        f"layers of a pipeline whose partitions share the CPU's random numbers must draw them directly, got a draw "
        f"within {got} in a layer, which would recompute with others; {advice}"
    )


def _address(generator: Any) -> int:
    """PyTorch wraps a generator anew for each call: its address tells which one it is."""
    address: int = generator._cdata  # noqa: SLF001 - it has no public name
    return address


@functools.cache
def _may_draw(func: Any) -> bool:
    """Whether it is tagged so, or is not PyTorch's own: users' operators have no tag."""
    return _is_random(func) or func.namespace not in _TAGGED


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@functools.cache
def _with_generator(func: Any) -> Any:
    """The overload that takes a generator, as ``rand.generator`` for ``rand``, if there is one."""
    name = func._overloadname  # noqa: SLF001 - public properties: pytorch#67254
    other = getattr(func.overloadpacket, "generator" if name == "default" else f"{name}_generator", None)
    same = other is not None and [each for each in _argument_names(other) if each != "generator"]
    return other if same == _argument_names(func) else func


@functools.cache
def _argument_names(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]  # noqa: SLF001 - public properties: pytorch#67254


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is attention, which draws for its dropout alone, without dropout."""
    names = _argument_names(func)
    return "dropout_p" in names and not dict(zip(names, args, strict=False), **kwargs).get("dropout_p")


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in args:
        if isinstance(value, Tensor):
            return _indexed(value.device)
    return _indexed(torch.device(kwargs.get("device") or "cpu"))


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())
