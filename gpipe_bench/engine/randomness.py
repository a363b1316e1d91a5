"""The random numbers of each task: reproducible in a recomputation, and from run to run.

Two ways, chosen per partition:

    saved      the states of the default generators are saved before the first pass and put back for the recomputation.
               Right as long as nobody else draws from them meanwhile; exactly the numbers of the plain module.
    own        generators of the task's own, seeded from (batch, i, j), see :mod:`gpipe_bench.engine.redirect`. For
               generators that parallel workers share: those of the CPU.
    none       the partition draws no random numbers, so nothing is done.

A pipeline whose tasks cannot run at the same time uses ``saved``. Otherwise a partition's first pass in each training
mode runs with ``own``, which also shows what it draws; from then on it uses what fits. Should a layer draw for the
first time later (it may draw under a condition), the default generator's state gives it away at the end of the forward
pass; recomputations of that batch then watch what they draw, and raise rather than train on another mask.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe_bench.engine.redirect import Redirect, default_generator
from gpipe_bench.errors import RandomnessError

__all__ = ["Draws", "Randomness"]

_UNKNOWN, _NONE, _SAVED, _OWN = "unknown", "none", "saved", "own"

# Held by a recomputation that draws from the CPU's default generator, of which all backward threads have but one.
_cpu_lock = threading.RLock()


class Randomness:
    """Which way each partition goes; lives as long as the pipeline.

    Args:
        devices: one per partition.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._ways: dict[tuple[int, bool], str] = {}

    def begin(self, *, concurrent: bool, training: bool) -> Batch:
        """The random numbers of one batch.

        Args:
            concurrent: whether tasks of this batch can run at the same time.
            training: training mode of the pipeline.
        """
        return Batch(self, concurrent, training)

    def way(self, j: int, training: bool) -> str:
        """How partition j gets its random numbers."""
        return self._ways.get((j, training), _UNKNOWN)

    def learn(self, j: int, training: bool, drew: set[str]) -> None:
        """Remember from which device types partition j was seen to draw."""
        shared = "cpu" in drew or drew - {self._devices[j].type}
        way = _OWN if shared else _SAVED if drew else _NONE
        known = self.way(j, training)
        if known == _UNKNOWN or way == _OWN or (way == _SAVED and known == _NONE):
            self._ways[j, training] = way

    def device(self, j: int) -> torch.device:
        """The device of partition j."""
        return self._devices[j]


class Batch:
    """The random numbers of one forward pass and its recomputations."""

    def __init__(self, randomness: Randomness, concurrent: bool, training: bool) -> None:
        self.randomness = randomness
        self.training = training
        self.suspect = False
        self.drew = False
        self.concurrent = concurrent
        self._before = torch.default_generator.get_state() if concurrent else None
        self._seed = b"" if self._before is None else _digest(self._before)

    def draws(self, i: int, j: int) -> Draws:
        """The random numbers of task (i, j)."""
        way = self.randomness.way(j, self.training) if self.concurrent else _SAVED
        return Draws(self, i, j, way)

    def seed(self, i: int, j: int) -> int:
        """A number for task (i, j) of this batch."""
        return int.from_bytes(hashlib.blake2b(self._seed + b"%d,%d" % (i, j), digest_size=7).digest(), "little")

    def end(self) -> None:
        """After the forward pass: note unexpected draws, and let the next batch draw other numbers."""
        if self._before is None:
            return
        self.suspect = not torch.equal(self._before, torch.default_generator.get_state())
        if self.drew:
            torch.empty(1).uniform_()


@dataclass(slots=True)
class Draws:
    """The random numbers of one task.

    Attributes:
        batch: the batch it belongs to.
        i: its micro-batch.
        j: its partition.
        way: ``unknown``, ``none``, ``saved`` or ``own``.
        states: for ``saved``: generators and the states in which the first pass found them.
    """

    batch: Batch
    i: int
    j: int
    way: str
    states: tuple[tuple[torch.Generator, Tensor], ...] = ()

    def first_pass(self, *, again: bool = True) -> AbstractContextManager[object]:
        """For the first pass; ``again`` says whether a recomputation will follow."""
        if self.way in (_UNKNOWN, _OWN):
            return self._own()
        return self._saved() if self.way == _SAVED and again else nullcontext()

    def replay(self) -> AbstractContextManager[object]:
        """For the recomputation: the same numbers once more."""
        if self.way in (_UNKNOWN, _OWN):
            return self._own()
        if self.way == _SAVED:
            return self._restored()
        return self._watched() if self.batch.suspect else nullcontext()

    @contextmanager
    def _own(self) -> Iterator[None]:
        with Redirect(self.batch.seed(self.i, self.j)) as redirect:
            yield
        self.batch.drew |= bool(redirect.drew)
        self.batch.randomness.learn(self.j, self.batch.training, redirect.drew)

    @contextmanager
    def _saved(self) -> Iterator[None]:
        # Among concurrent tasks only a generator that no other worker uses can be saved.
        devices = {self.batch.randomness.device(self.j)}
        if not self.batch.concurrent:
            devices.add(torch.device("cpu"))
        before = [(generator, generator.get_state()) for generator in map(default_generator, devices)]
        yield
        # What was not drawn from need not be put back: devices recompute at the same time, and share the CPU's.
        self.states = tuple(
            (generator, state) for generator, state in before if not torch.equal(state, generator.get_state())
        )

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
        with Redirect(self.batch.seed(self.i, self.j)) as redirect:
            yield
        if redirect.drew:
            self.batch.randomness.learn(self.j, self.batch.training, redirect.drew)
            raise RandomnessError(
                f"random numbers of partition {self.j} must be drawn from the first batch on, got the first draw in a "
                "later batch, whose masks cannot be reproduced; run the batch again: from now on they can"
            )


def _digest(state: Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
