"""The random numbers of each task: the same in its recomputation and in the next run from one seed.

Where tasks run one by one, they draw from the default generators, and the numbers are those of the plain module. A
checkpointed task notes the states of the generators before its first pass, and puts those that moved back for the
recomputation. An accelerator's generator is treated so everywhere, since one thread at a time draws from it, and so are
the generators that layers have as attributes.

Where partitions compute at the same time, they share the CPU's default generator. A task that draws from it then gets
a generator of its own, seeded from (batch, i, j): in a :class:`Redirect` whatever a thread draws comes from generators
that belong to the task. Else who gets which number would be a race. Which tasks draw is observed:

    i = 0     first pass in a redirect, which shows whether the partition draws in this batch
    i > 0     in a redirect if the partition draws, else as it is; the default generator's state shows whether a number
              was drawn all the same. Nobody can know by which thread, so a checkpointed task is then recomputed at
              once, in a redirect. Its outputs and its graph are those of the recomputation. From the next task on the
              partition counts as one that draws.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from gpipe_bench.autograd.dispatch_mode import DispatchMode
from gpipe_bench.engine.partition import TASK
from gpipe_bench.engine.worker import Turns
from gpipe_bench.errors import RandomnessError

# Held by a recomputation that draws from the CPU's default generator, of which all backward threads have but one.
_cpu_lock = threading.RLock()


def state_digest() -> bytes:
    """Of the default generator."""
    return hashlib.blake2b(_default_state(), digest_size=16).digest()


def seed_of(digest: bytes, *place: int) -> int:
    """A number for a place, such as a task (i, j), in what has this digest."""
    return int.from_bytes(hashlib.blake2b(digest + b"%d," * len(place) % place, digest_size=7).digest(), "little")


@contextmanager
def seeded(device: torch.device) -> Iterator[Callable[[int], None]]:
    """A block that draws other numbers for each ``number`` that it calls this function with.

    They come from the default generators of the CPU and the device, which are put back at its end.
    """
    generators = {torch.default_generator, default_generator(device)}
    before, digest = [(each, each.get_state()) for each in generators], state_digest()

    def seed(number: int) -> None:
        for each in generators:
            each.manual_seed(seed_of(digest, number))

    try:
        yield seed
    finally:
        for each, state in before:
            each.set_state(state)


class BatchRandomness:
    """The random numbers of one batch.

    Args:
        devices: one per partition.
        layers: of the partitions.
        drawing: partitions that were seen to draw, in training mode or not; kept from batch to batch.
        turns: of the tasks. They begin to take them once an operator has drawn from a default generator on loan, which
            nobody else may use or put back meanwhile, as a checkpoint in a layer does in its backward pass.
        concurrent: whether tasks of this batch can run at the same time.
        training: training mode of the pipeline.

    Attributes:
        digest: what all seeds of this batch come from.
        drew: whether a task has drawn from a generator of its own.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        layers: Sequence[nn.Module],
        drawing: set[tuple[int, bool]],
        turns: Turns,
        *,
        concurrent: bool,
        training: bool,
    ) -> None:
        # The loss counts as the partition after the last.
        self.devices, self.concurrent, self.drew = [*devices, *devices[-1:]], concurrent, False
        self._layers, self._drawing, self._turns, self._training = layers, drawing, turns, training
        self._seen: set[int] = set()
        self._generators: dict[int, list[torch.Generator]] = {}
        self._start = _default_state() if concurrent else b""
        self.digest = hashlib.blake2b(self._start, digest_size=16).digest() if concurrent else b""
        # The stack tells a pipeline in a layer, which is recomputed with it, from one that a loss or a hook calls.
        self.nested = concurrent and any(frame.f_code is TASK for frame, _ in walk_stack(None))
        self._moved = False

    def share(self, digest: bytes) -> None:
        """Let the batch be one of several processes, of which the first one has this digest."""
        self.concurrent = True
        self._start, self.digest = _default_state(), digest

    def found(self) -> tuple[bool, bool]:
        """Whether this process has drawn for its tasks, and from its default generator."""
        return self.drew, _default_state() != self._start

    def settle(self, found: Sequence[tuple[bool, bool]]) -> None:
        """Take what all processes have found, so that their default generators go the same way."""
        self.drew, self._moved = any(drew for drew, _ in found), any(moved for _, moved in found)

    def end(self) -> None:
        """Let the next batch draw other numbers."""
        if self._moved:
            torch.default_generator.manual_seed(seed_of(hashlib.blake2b(self._start).digest()))
        elif self.concurrent and self.drew:
            torch.empty(1, device="cpu").uniform_()

    def watches(self, j: int) -> bool:
        """Whether a task of partition j that begins now may draw."""
        return j not in self._seen or (j, self._training) in self._drawing

    def learn(self, j: int, *, drew: bool, unsure: bool, lent: bool = False) -> None:
        """Remember whether a task of partition j was seen to draw, and from a generator on loan, or may have drawn."""
        self._seen.add(j)
        self._turns.taken |= lent
        self.drew |= drew
        if drew or unsure:
            self._drawing.add((j, self._training))

    def noted(self, j: int) -> list[torch.Generator]:
        """The generators whose states a checkpointed task of partition j notes."""
        if j not in self._generators:
            device = self.devices[j]
            own = [
                value
                for layer in self._layers[j].modules()
                for value in vars(layer).values()
                if isinstance(value, torch.Generator)
            ]
            own += [default_generator(device)] if device.type != "cpu" else []
            own += [] if self.concurrent else [torch.default_generator]
            self._generators[j] = list(dict.fromkeys(own))
        return self._generators[j]


@dataclass(slots=True)
class Draws:
    """The random numbers of one task.

    Attributes:
        batch: the batch it belongs to.
        i: its micro-batch.
        j: its partition.
        drew: whether its first pass drew from a generator of its own.
        unsure: whether somebody drew from the default generator during its first pass, or may have: its numbers cannot
            be found again.
        states: generators that the first pass drew from as they are, and the states in which it found them.
    """

    batch: BatchRandomness
    i: int
    j: int
    drew: bool = False
    unsure: bool = False
    states: tuple[tuple[torch.Generator, Tensor], ...] = ()

    @contextmanager
    def first_pass(self, *, again: bool = True) -> Iterator[None]:
        """For the first pass; ``again`` says whether a recomputation will follow."""
        noted = [(each, each.get_state()) for each in self.batch.noted(self.j)] if again else []
        if not self.batch.concurrent:
            yield
        elif self.batch.watches(self.j):
            before = _default_state()
            with self._redirect() as redirect:
                yield
            self.drew, self.unsure = redirect.drew, redirect.disturbed or before != _default_state()
            self.batch.learn(self.j, drew=self.drew, unsure=self.unsure, lent=redirect.lent)
        else:
            with lending:
                made, before = Loans.made, _default_state()
                Loans.bare += 1
            try:
                yield
            finally:
                with lending:
                    Loans.bare -= 1
                    # A draw while the default generator is on loan leaves no trace in its state.
                    self.unsure = made != Loans.made or before != _default_state()
            if self.unsure:
                self.batch.learn(self.j, drew=False, unsure=True)
        if noted:
            # Only generators that were used are put back: devices recompute at the same time, and share the CPU's.
            self.states = tuple([pair for pair in noted if _bytes(pair[1]) != _bytes(pair[0].get_state())])

    def replay(self) -> AbstractContextManager[None]:
        """For the recomputation: the same numbers once more."""
        return self._replay() if self.states or self.drew or self.unsure else nullcontext()

    @contextmanager
    def _replay(self) -> Iterator[None]:
        shared = any(generator is torch.default_generator for generator, _ in self.states)
        with _cpu_lock if shared else nullcontext():
            now = [(generator, generator.get_state()) for generator, _ in self.states]
            for generator, state in self.states:
                generator.set_state(state)
            try:
                with self._redirect() if self.drew or self.unsure else nullcontext() as redirect:
                    yield
            finally:
                for generator, state in now:
                    generator.set_state(state)
        if redirect is not None:
            self.batch.drew |= redirect.drew

    def _redirect(self) -> Redirect:
        kind = self.batch.devices[self.j].type
        seed = seed_of(self.batch.digest, self.i, self.j)
        return Redirect(seed, None if kind == "cpu" else kind, nested=self.batch.nested)


def _default_state() -> bytes:
    """Of the CPU's default generator, when no operator has it on loan."""
    with lending:
        return _bytes(torch.default_generator.get_state())


def _bytes(state: Tensor) -> bytes:
    """A generator's state, which is on the CPU whatever its device."""
    # By its address: numpy() is an operation, which a mode that watches operations would see.
    return ctypes.string_at(state.data_ptr(), state.numel())


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
