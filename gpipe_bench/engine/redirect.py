"""Random numbers of one task from generators of its own.

PyTorch has one default generator per device, shared by all threads. When workers on the CPU draw from it at the same
time, who gets which number is a race: a run could not be repeated, and a recomputation could not find its dropout
masks again. Within :class:`Redirect`, whatever a thread draws comes from generators that belong to the task.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from gpipe_bench.engine.dispatch_mode import DispatchMode
from gpipe_bench.engine.partition import TASK
from gpipe_bench.errors import RandomnessError

_swap_lock = threading.Lock()
_CHECKPOINT = torch.utils.checkpoint.__file__


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
        self.drew = False

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``; if it is random, with the task's generator."""
        if not _is_random(func) or _drops_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        if device.type == self._keep:
            return func(*args, **kwargs)
        self.drew = True
        _check_drawn_once(nested=self._nested)
        if "generator" in (names := _argument_names(func)):
            if dict(zip(names, args, strict=False), **kwargs).get("generator") is None:
                kwargs = {**kwargs, "generator": self._generator(device)}
            return func(*args, **kwargs)
        with self._swapped(device):
            return func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    @contextmanager
    def _swapped(self, device: torch.device) -> Iterator[None]:
        """For operators that know only the default generator, lend it the task's state."""
        own, shared = self._generator(device), default_generator(device)
        with _swap_lock:
            before = shared.get_state()
            shared.set_state(own.get_state())
            try:
                yield
            finally:
                own.set_state(shared.get_state())
                shared.set_state(before)


def _check_drawn_once(*, nested: bool) -> None:
    """Refuse a number that somebody else will want to draw again."""
    if nested:
        raise RandomnessError(_refusal("a pipeline", "make its layers partitions of the outer one"))
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


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


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
