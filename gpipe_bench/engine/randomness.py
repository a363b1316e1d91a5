"""The random numbers of each task: the same in its recomputation and in the next run from one seed.

Where tasks run one by one, they draw from the default generators, and the numbers are those of the plain module. A
checkpointed task notes the states of the generators before its first pass, and puts those that moved back for the
recomputation. An accelerator's generator is treated so everywhere, since one thread at a time draws from it, and so are
the generators that layers have as attributes.

Where partitions compute at the same time, they share the CPU's default generator. A task that draws from it then gets
a generator of its own, seeded from (batch, i, j), see :mod:`gpipe_bench.engine.redirect`. Which tasks draw is observed:

    i = 0     first pass in a redirect, which shows whether the partition draws in this batch
    i > 0     in a redirect if the partition draws, else as it is; the default generator's state shows whether a number
              was drawn all the same. Nobody can know by which thread, so a checkpointed task is then recomputed at
              once, in a redirect. Its outputs and its graph are those of the recomputation. From the next task on the
              partition counts as one that draws.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from traceback import walk_stack

import torch
from torch import Tensor, nn

from gpipe_bench.engine.partition import TASK
from gpipe_bench.engine.redirect import Loans, Redirect, default_generator, lending
from gpipe_bench.engine.worker import Turns

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
        self.devices, self.concurrent, self.drew = devices, concurrent, False
        self._layers, self._drawing, self._turns, self._training = layers, drawing, turns, training
        self._seen: set[int] = set()
        self._generators: dict[int, list[torch.Generator]] = {}
        self._start = _default_state() if concurrent else b""
        self.digest = hashlib.blake2b(self._start, digest_size=16).digest() if concurrent else b""
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
        """Whether a task of partition j that begins now may draw; the loss counts as the partition after the last."""
        return j not in self._seen or (j, self._training) in self._drawing

    def learn(self, j: int, *, drew: bool, unsure: bool, lent: bool = False) -> None:
        """Remember whether a task of partition j was seen to draw, and from a generator on loan, or may have drawn."""
        self._seen.add(j)
        self._turns.taken |= lent
        self.drew |= drew
        if drew or unsure:
            self._drawing.add((j, self._training))

    def device(self, j: int) -> torch.device:
        """Of partition j, or of the loss."""
        return self.devices[min(j, len(self.devices) - 1)]

    def noted(self, j: int) -> list[torch.Generator]:
        """The generators whose states a checkpointed task of partition j notes."""
        if j not in self._generators:
            device = self.device(j)
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
        kind = self.batch.device(self.j).type
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
