"""torchgpipe, and fairscale's Pipe, which was made from it; with their skips in the place of ours."""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch

from gpipe_bench.judge.skips import translated
from studies.peers.seat import Seat, Step
from studies.peers.workloads import make_work

PIPES: Final = {"torchgpipe": ("torchgpipe", "GPipe"), "fairscale": ("fairscale.nn.pipe", "Pipe")}
"""Package -> module and name of its pipeline; the module ``skip`` of that has its skips."""


def build(seat: Seat) -> Step:
    """The step of the package of the contender."""
    case, (module, name) = seat.case, PIPES[seat.contender.package]
    work, places = make_work(case), case.partition_devices()
    layers = translated(work.model, importlib.import_module(f"{module}.skip"))
    options: dict[str, Any] = {"devices": places, "chunks": case.chunks, "checkpoint": case.checkpoint}
    pipe = getattr(importlib.import_module(module), name)(layers, list(case.balance), **options)
    batch, target = work.batch.to(places[0]), work.target.to(places[-1])
    return Step(
        list(pipe.parameters()), lambda: torch.autograd.backward(work.loss(pipe(batch), target)), places, case.chunks
    )
