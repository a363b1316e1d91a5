"""``gpipe_bench.distributed.Pipe``: this project's pipeline with a process per device."""

from __future__ import annotations

from gpipe_bench.distributed import Pipe
from studies.peers.seat import Seat, Step
from studies.peers.workloads import make_work, own_data


def build(seat: Seat) -> Step:
    """The step of one rank with the schedule that the contender names."""
    case, work = seat.case, make_work(seat.case)
    pipe = Pipe(
        work.model, case.balance, schedule=seat.contender.option, device=seat.place, chunks=case.chunks,
        checkpoint=case.checkpoint,
    )  # fmt: skip
    batch, target = own_data(seat, work)
    parameters = list(work.model.parameters())
    return Step(
        parameters, lambda: pipe.step(batch, target, work.loss, reduction="mean") and None, [seat.place], case.chunks
    )
