"""Times of partitions on their own, and the balance under which a pipeline of them is quickest.

Layers that are timed one by one find their input in the caches, and a forward and a backward pass that wait for each
other at the loss are not evened out by one sum. So the balance by measured layers is only where the search begins:

    makespan(forward, backward, m)  of the partitions as they are, for every cut a few layers to either side of it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import torch
from torch import Tensor, nn

from gpipe_bench.balance import balance_by_time
from gpipe_bench.bench.peers.cases import PeerCase
from gpipe_bench.bench.peers.runners import recomputed, synchronize
from gpipe_bench.bench.peers.skips import Stage, make_stages
from gpipe_bench.bench.peers.split import makespan
from gpipe_bench.bench.peers.workloads import make_work

FEWEST_ROUNDS: Final = 3
"""Rounds of a measurement, however long they take."""

_REACH: Final = 6
"""How many layers a cut may move from where layers timed one by one have it."""

Times = tuple[list[float], list[float]]


def even_balance(case: PeerCase, seconds: float) -> list[int]:
    """Layers per partition with which the partitions of ``case``, as they are measured, make the quickest pipeline.

    Args:
        case: its balance is not asked.
        seconds: to spend on the layers, and as many for every place of a cut; each is timed at least twice.
    """
    work, place = make_work(case), case.placement()[0]
    sample = work.batch.chunk(case.chunks)[0].to(place)
    best = balance_by_time(case.partitions, work.model.to(place), sample, timeout=seconds, device=place)
    boundaries = case.partitions - 1
    for boundary in range(boundaries):
        near = _neighbours(best, boundary)
        spans = [makespan(*times, case.chunks) for times in _times_of(case, near, seconds * len(near) / boundaries)]
        best = near[spans.index(min(spans))]
    return best


def _neighbours(balance: Sequence[int], boundary: int) -> list[list[int]]:
    """``balance``, and what it becomes when one cut moves by up to a few layers."""
    left, right = balance[boundary], balance[boundary + 1]
    moves = sorted(range(max(-_REACH, 1 - left), min(_REACH, right - 1) + 1), key=abs)
    return [[*balance[:boundary], left + move, right - move, *balance[boundary + 2 :]] for move in moves]


def partition_times(case: PeerCase, seconds: float) -> Times:
    """Median seconds of forward, and of recomputation and backward, of each partition; rounds for ``seconds``."""
    return _times_of(case, [case.balance], seconds)[0]


def _times_of(case: PeerCase, balances: Sequence[Sequence[int]], seconds: float) -> list[Times]:
    """The times of every balance, taken in turns."""
    work, places = make_work(case), case.placement()
    part, wanted = work.batch.chunk(case.chunks)[0], work.target.chunk(case.chunks)[0].to(places[-1])

    def loss(output: Tensor) -> Tensor:
        return work.loss(output, wanted)

    pipelines = [make_stages(work.model, balance) for balance in balances]
    taken: list[list[Times]] = [[] for _ in balances]
    deadline = time.perf_counter() + seconds
    rounds = 0
    while rounds < FEWEST_ROUNDS or time.perf_counter() < deadline:
        for stages, times in zip(pipelines, taken, strict=True):
            found = _walk(stages, places, part, loss, again=recomputed(case) > 0)
            if rounds:
                times.append(found)
        rounds += 1
    return [(_medians([times[0] for times in one]), _medians([times[1] for times in one])) for one in taken]


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [median(times) for times in zip(*rounds, strict=True)]


def _walk(
    stages: Sequence[Stage], places: Sequence[str], part: Tensor, loss: Callable[[Tensor], Tensor], *, again: bool
) -> Times:
    """Seconds of forward and backward of each stage, one after the other."""
    tensors: tuple[Tensor, ...] = (part,)
    forward, backward = [], []
    for j, (stage, place) in enumerate(zip(stages, places, strict=True)):
        stage.to(place)  # moves nothing but on several devices
        inputs = [tensor.to(place).requires_grad_(j > 0) for tensor in tensors]
        tensors, there, back = _visit(stage, inputs, place, loss if j == len(stages) - 1 else None, again=again)
        forward.append(there)
        backward.append(back)
    return forward, backward


def _visit(
    stage: nn.Module, inputs: list[Tensor], place: str, finish: Callable[[Tensor], Tensor] | None, *, again: bool
) -> tuple[tuple[Tensor, ...], float, float]:
    """Run a stage forward and backward on its own; its outputs, and the seconds of both.

    With ``again`` the forward pass keeps nothing, and the backward pass begins with another one, as under checkpoints.
    """

    def forward() -> tuple[Tensor, ...]:
        given = stage(*inputs)
        outputs = given if isinstance(given, tuple) else (given,)
        return outputs if finish is None else (finish(outputs[0]),)

    synchronize([place])
    start = time.perf_counter()
    with torch.set_grad_enabled(not again):
        outputs = forward()
    synchronize([place])
    spent = time.perf_counter() - start
    gradients = [torch.ones_like(output) for output in outputs]
    start = time.perf_counter()
    kept = forward() if again else outputs
    torch.autograd.backward(kept, gradients)
    synchronize([place])
    return tuple(output.detach() for output in outputs), spent, time.perf_counter() - start
