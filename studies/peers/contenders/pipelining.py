"""torch.distributed.pipelining, a process per device: stages that hand skips on, and checkpoints of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from gpipe_bench.judge.skips import make_stages
from studies.peers.seat import Seat, Step
from studies.peers.workloads import make_work, own_data


def build(seat: Seat) -> Step:
    """The step of one rank with the schedule that the contender names."""
    case, place, work = seat.case, seat.place, make_work(seat.case)
    stages = make_stages(work.model, case.balance, seat.recomputed, sent=True)
    own = {j: stages[j].to(place) for j in seat.own()}
    pieces = [PipelineStage(stage, j, len(stages), torch.device(place)) for j, stage in own.items()]
    schedule: Any = getattr(pipelining, seat.contender.option)
    plan = schedule(pieces if len(pieces) > 1 else pieces[0], case.chunks, loss_fn=work.loss)
    batch, target = own_data(seat, work)
    entering = [] if batch is None else [batch]

    def step() -> None:
        for stage in own.values():
            stage.calls = 0
        plan.step(*entering, target=target, return_outputs=False)

    return Step(list(work.model.parameters()), step, [place], case.chunks)
