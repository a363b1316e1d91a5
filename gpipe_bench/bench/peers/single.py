"""A contender that lives in one process, timed or counted."""

from __future__ import annotations

import time

from torch import Tensor

from gpipe_bench.bench.peers.cases import PeerCase
from gpipe_bench.bench.peers.contenders import Contender
from gpipe_bench.bench.peers.live import peak_counter
from gpipe_bench.bench.peers.runners import CountedStep, make_step


class SingleProcess(CountedStep):
    """Runs the steps of a contender here.

    Args:
        contender: one without a process per device.
        case: what it runs.
        count: whether to count live bytes, which makes it slow.
    """

    def __init__(self, contender: Contender, case: PeerCase, *, count: bool) -> None:
        self.peak = peak_counter(case.placement()) if count else None
        self.step = make_step(contender, case)
        self.pieces = 1 if contender.option == "whole" else case.chunks

    def run(self, warmup: int, steps: int) -> tuple[list[float], list[float]]:
        """Seconds and CPU seconds of ``steps`` steps, after ``warmup`` that are not timed."""
        for _ in range(warmup):
            self.step()
        wall, cpu = [], []
        for _ in range(steps):
            start, used = time.perf_counter(), time.process_time()
            self.step()
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - used)
        return wall, cpu

    def gradients(self) -> list[Tensor]:
        """The gradients that a step leaves, on the CPU, in the order of the model's parameters."""
        self.step()
        return [gradient.cpu() for gradient in self.step.gradients()]
