"""This project's engine: ``pipe(x)`` and ``loss.backward()``, or ``pipe.step`` for networks with a schedule."""

from __future__ import annotations

import torch

from gpipe_bench import GPipe
from studies.peers.seat import Seat, Step
from studies.peers.workloads import make_work


def build(seat: Seat) -> Step:
    """The step of the engine with the schedule that the contender names; without one, with the paper's executor."""
    case, name = seat.case, seat.contender.name
    work, places = make_work(case), case.partition_devices()
    pipe = GPipe(
        work.model, list(case.balance), devices=places, chunks=case.chunks, checkpoint=case.checkpoint,
        schedule=seat.contender.option or None, workers="never" if name.endswith("one-thread") else "always",
    )  # fmt: skip
    batch, target = work.batch.to(places[0]), work.target.to(places[-1])

    def step() -> None:
        if seat.contender.only == "networks":
            pipe.step(batch, target, work.loss, reduction="mean")
        else:
            torch.autograd.backward(work.loss(pipe(batch), target))

    return Step(list(pipe.parameters()), step, places, case.chunks)
