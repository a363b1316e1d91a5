"""Checkpoints of ``torch.distributed.checkpoint``, made of what all ranks have, without its own collectives.

``dcp.save`` gathers plans over a process group. Ranks in virtual time have none, so one of them does the same steps
with the plans of all.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils import _pytree

from gpipe_bench.distributed import Pipe

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def checkpoint_of(pipe: Pipe, optimizer: Any) -> dict[str, Any]:
    """The state of a rank, whose tensors are its own."""
    return {"model": pipe.state_dict(), "optimizer": get_optimizer_state_dict(pipe, optimizer, options=OPTIONS)}


def copied(state: dict[str, Any]) -> Any:
    """A state that training does not change any more."""
    return _pytree.tree_map(lambda value: value.clone() if hasattr(value, "clone") else value, state)


def save(states: Sequence[dict[str, Any]], folder: str) -> None:
    """Write the states of all ranks, as each of them would by ``dcp.save``."""
    planners = [DefaultSavePlanner() for _ in states]
    writers = [dcp.FileSystemWriter(folder, sync_files=False) for _ in states]
    plans = []
    for rank, (state, planner, writer) in enumerate(zip(states, planners, writers, strict=True)):
        planner.set_up_planner(state, writer.storage_meta(), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    parts = zip(plans, planners, writers, strict=True)
    results = [writer.write_data(planner.finish_plan(plan), planner).value() for plan, planner, writer in parts]
    writers[0].finish(metadata, results)


def load(pipe: Pipe, optimizer: Any, folder: str) -> None:
    """Load the part of a rank."""
    state = checkpoint_of(pipe, optimizer)
    with warnings.catch_warnings():
        # That there is no process group: it is given none.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    pipe.load_state_dict(state["model"])
    set_optimizer_state_dict(pipe, optimizer, state["optimizer"], options=OPTIONS)
