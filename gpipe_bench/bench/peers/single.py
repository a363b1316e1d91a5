"""A contender that lives in one process, timed or counted."""

from __future__ import annotations

import time

from torch import Tensor

from gpipe_bench.bench.peers.cases import PeerCase
from gpipe_bench.bench.peers.contenders import Contender
from gpipe_bench.bench.peers.live import Peak, peak_counter
from gpipe_bench.bench.peers.runners import TrainingStep, make_step


class SingleProcess:
    """Runs the steps of a contender here.

    Args:
        contender: one whose kind is not ``pipelining``.
        case: what it runs.
        count: whether to count live bytes, which makes it slow.
    """

    def __init__(self, contender: Contender, case: PeerCase, *, count: bool) -> None:
        self._peak: Peak | None = peak_counter(case.placement()) if count else None
        self._step: TrainingStep = make_step(contender, case)
        self._batch_size = case.batch_size

    def run(self, warmup: int, steps: int) -> tuple[list[float], list[float]]:
        """Seconds and CPU seconds of ``steps`` steps, after ``warmup`` that are not timed."""
        for _ in range(warmup):
            self._step()
        wall, cpu = [], []
        for _ in range(steps):
            start, used = time.perf_counter(), time.process_time()
            self._step()
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - used)
        return wall, cpu

    def gradients(self) -> list[Tensor]:
        """The gradients that a step leaves, on the CPU, in the order of the model's parameters."""
        self._step()
        return [gradient.cpu() for gradient in self._step.gradients()]

    def forward_passes(self) -> float:
        """Of a step, per sample: one, and what checkpoints compute again."""
        return self._step.forward_passes(self._batch_size)

    def peak_bytes(self) -> int:
        """The most bytes of tensors that were alive at once; 0 where they are not counted."""
        return 0 if self._peak is None else self._peak.peak_bytes()
