"""The module without a pipeline: the whole batch at once, or one micro-batch after another with summed gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from gpipe_bench.judge.skips import make_stages
from studies.peers.seat import Seat, Step
from studies.peers.workloads import make_work


def build(seat: Seat) -> Step:
    """The step on the device of the seat; of ``loop-processes`` over its share of the micro-batches."""
    case, place, work = seat.case, seat.place, make_work(seat.case)
    model, batch, target = work.model.to(place), work.batch.to(place), work.target.to(place)
    parameters = list(model.parameters())
    if seat.contender.option == "whole":
        return Step(parameters, lambda: torch.autograd.backward(work.loss(model(batch), target)), [place], 1)
    pairs = list(zip(batch.chunk(case.chunks), target.chunk(case.chunks), strict=True))[seat.rank :: seat.ranks]
    # Where the mode asks for no checkpoint the module runs as it is: a user would not cut it.
    stages = make_stages(model, case.balance, seat.recomputed) if seat.recomputed else []

    def through(x: Tensor) -> Tensor:
        tensors: tuple[Tensor, ...] = (x,)
        for stage in stages:
            given = stage(*tensors)
            tensors = given if isinstance(given, tuple) else (given,)
        return tensors[0]

    def step() -> None:
        for stage in stages:
            stage.calls = 0
        for part, wanted in pairs:
            output = through(part) if stages else model(part)
            # Gradients are those of the mean over all micro-batches.
            torch.autograd.backward(work.loss(output, wanted) / case.chunks)

    return Step(parameters, step, [place], case.chunks)
