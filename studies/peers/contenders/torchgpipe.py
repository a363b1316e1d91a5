"""torchgpipe: its GPipe, with its skips in the place of ours."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from studies.peers.seat import Seat, Step
from studies.peers.skips import translated
from studies.peers.workloads import make_work

PIPE, SKIP = ("torchgpipe", "GPipe"), "torchgpipe.skip"


def build(seat: Seat, home: tuple[str, str] = PIPE, skip: str = SKIP) -> Step:
    """The step of torchgpipe, or of a package with the same interface.

    Args:
        seat: whose step it is.
        home: module and name of the pipeline.
        skip: module of the skips.
    """
    case, (module, name) = seat.case, home
    work, places = make_work(case), case.placement()
    layers = translated(work.model, importlib.import_module(skip))
    options: dict[str, Any] = {"devices": places, "chunks": case.chunks, "checkpoint": case.checkpoint}
    pipe = getattr(importlib.import_module(module), name)(layers, list(case.balance), **options)
    batch, target = work.batch.to(places[0]), work.target.to(places[-1])
    return Step(
        list(pipe.parameters()), lambda: torch.autograd.backward(work.loss(pipe(batch), target)), places, case.chunks
    )
