"""The random numbers of each task: reproducible in a recomputation, and from run to run.

Numbers come from the generator of the partition's own device and from that of the CPU. In a pipeline whose tasks cannot
run at the same time both are saved: their states are noted before the first pass and put back for the recomputation,
and the numbers are exactly those of the plain module. Otherwise an accelerator's generator is saved still, since one
thread at a time draws from it; the CPU's is shared by all workers, and treated by partition:

    own        the task draws from a generator of its own, seeded from (batch, i, j), see
               :mod:`gpipe_bench.engine.redirect`.
    none       the partition does not draw from it, so nothing is done.

A partition's first pass in each training mode runs as if ``own``, which also shows what it does. Should a layer draw
for the first time later (it may draw under a condition), the state of the CPU's generator gives it away at the end of
the forward pass; recomputations of that batch then watch what they draw, and raise rather than train on another mask.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe_bench.engine.context import within
from gpipe_bench.engine.partition import in_task
from gpipe_bench.engine.redirect import Redirect, default_generator
from gpipe_bench.errors import RandomnessError

_UNKNOWN, _NONE, _SAVED, _OWN = "unknown", "none", "saved", "own"

# Held by a recomputation that draws from the CPU's default generator, of which all backward threads have but one.
_cpu_lock = threading.RLock()


def state_digest() -> bytes:
    """Of the default generator."""
    return hashlib.blake2b(_bytes(torch.default_generator.get_state()), digest_size=16).digest()


class ForwardRandomness:
    """The random numbers of one forward pass and its recomputations.

    Args:
        devices: one per partition.
        ways: which way each partition goes in each training mode; kept from batch to batch.
        concurrent: whether tasks of this batch can run at the same time.
        training: training mode of the pipeline.
    """

    def __init__(
        self, devices: Sequence[torch.device], ways: dict[tuple[int, bool], str], *, concurrent: bool, training: bool
    ) -> None:
        self.devices, self.concurrent = devices, concurrent
        self._ways, self._training = ways, training
        self._suspect = False
        self.drew = False
        self.nested = concurrent and in_task()
        self._state: bytes | None = _bytes(torch.default_generator.get_state()) if concurrent else None
        # What all seeds of this batch come from; where processes share a batch, that of the first.
        self.digest = b""

    def way(self, j: int) -> str:
        """How a task of partition j that begins now gets its random numbers."""
        return self._ways.get((j, self._training), _UNKNOWN) if self.concurrent else _SAVED

    def learn(self, j: int, redirect: Redirect) -> None:
        """Remember whether partition j was seen to draw from a generator that it shares, now or before."""
        self.drew |= redirect.drew
        self._ways[j, self._training] = _OWN if redirect.drew or self.way(j) == _OWN else _NONE

    def forget(self) -> None:
        """Find out anew which partitions draw."""
        for key, way in list(self._ways.items()):
            if key[1] == self._training and way == _NONE:
                del self._ways[key]

    def seed(self, i: int, j: int) -> int:
        """A number for task (i, j) of this batch."""
        return int.from_bytes(hashlib.blake2b(self._seed() + b"%d,%d" % (i, j), digest_size=7).digest(), "little")

    @property
    def suspect(self) -> bool:
        """Whether a task may have drawn unexpectedly: since the batch began, the CPU's generator has moved on."""
        return self._suspect or (self._state is not None and self._state != _bytes(torch.default_generator.get_state()))

    def end(self) -> None:
        """After the forward pass: note unexpected draws, and let the next batch draw other numbers."""
        if not self.concurrent:
            return
        self._suspect = self.suspect
        if self._suspect:
            self._seed()
        self._state = None
        if self.drew:
            torch.empty(1).uniform_()

    def _seed(self) -> bytes:
        """The digest; a recomputation asks only if its first pass did, or if suspect."""
        # A digest, made when needed: the graph keeps this batch, and the state itself is 5 kB.
        if not self.digest and self._state is not None:
            self.digest = hashlib.blake2b(self._state, digest_size=16).digest()
        return self.digest


@dataclass(slots=True)
class Draws:
    """The random numbers of one task.

    Attributes:
        batch: the batch it belongs to.
        i: its micro-batch.
        j: its partition.
        way: ``unknown``, ``none``, ``saved`` or ``own``; found out when the task begins, not when it is
            launched: then the partition's task before it has ended.
        states: generators that the first pass drew from as they are, and the states in which it found them.
    """

    batch: ForwardRandomness
    i: int
    j: int
    way: str = _UNKNOWN
    states: tuple[tuple[torch.Generator, Tensor], ...] = ()

    def first_pass(self, *, again: bool = True) -> AbstractContextManager[None]:
        """For the first pass; ``again`` says whether a recomputation will follow."""
        self.way = self.batch.way(self.j)
        blocks = []
        if again and (self.way == _SAVED or self.batch.devices[self.j].type != "cpu"):
            blocks.append(self._saved())
        if self.way in (_UNKNOWN, _OWN):
            blocks.append(self._own())
        return within(blocks)

    def replay(self) -> AbstractContextManager[None]:
        """For the recomputation: the same numbers once more."""
        blocks = [self._restored()] if self.states else []
        if self.way in (_UNKNOWN, _OWN):
            blocks.append(self._own())
        elif self.way == _NONE and self.batch.suspect:
            blocks.append(self._watched())
        return within(blocks)

    def _redirect(self) -> Redirect:
        kind = self.batch.devices[self.j].type
        seed = self.batch.seed(self.i, self.j)
        return Redirect(seed, None if kind == "cpu" else kind, nested=self.batch.nested)

    @contextmanager
    def _own(self) -> Iterator[None]:
        with self._redirect() as redirect:
            yield
        self.batch.learn(self.j, redirect)

    @contextmanager
    def _saved(self) -> Iterator[None]:
        """Note the states of the generators that the first pass draws from as they are."""
        device = self.batch.devices[self.j]
        generators = [default_generator(device)]
        if not self.batch.concurrent and device.type != "cpu":
            generators.append(torch.default_generator)
        before = [(generator, generator.get_state()) for generator in generators]
        yield
        # Only generators that were used are put back: devices recompute at the same time, and share the CPU's.
        self.states = tuple([pair for pair in before if _bytes(pair[1]) != _bytes(pair[0].get_state())])

    @contextmanager
    def _restored(self) -> Iterator[None]:
        shared = any(generator.device.type == "cpu" for generator, _ in self.states)
        with _cpu_lock if shared else nullcontext():
            now = [(generator, generator.get_state()) for generator, _ in self.states]
            for generator, state in self.states:
                generator.set_state(state)
            try:
                yield
            finally:
                for generator, state in now:
                    generator.set_state(state)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with self._redirect() as redirect:
            yield
        if redirect.drew:
            self.batch.forget()
            raise RandomnessError(
                f"random numbers of partition {self.j} must be drawn from the first batch on, got the first draw in a "
                "later batch, whose masks cannot be reproduced; run the batch again: from now on they can"
            )


def _bytes(state: Tensor) -> bytes:
    """A generator's state, which is on the CPU whatever its device."""
    # By its address: numpy() is an operation, which a mode that watches operations would see.
    return ctypes.string_at(state.data_ptr(), state.numel())
