"""Processes that stop before the pipeline is made, or wait for no time: the others end, and name them."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from gpipe_bench.distributed import PeerError, Pipe
from tests.distributed.ranks import die, run_processes
from tests.distributed.virtual import World, grid_of, run_ranks


def stopping(rank):
    """The last one of four processes is killed as it makes its fifth connection: to the replica of rank 1."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    connections, made = dist.ProcessGroupGloo, []

    def connect(*arguments):
        made.append(arguments)
        if len(made) == 5:
            die()
        return connections(*arguments)

    if rank == 3:
        dist.ProcessGroupGloo = connect
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    Pipe(layers, [1, 1], mesh=mesh["pipeline"], replicas=mesh["data"], timeout_s=5)


def test_a_process_that_is_killed_as_it_connects_is_named(tmp_path):
    *others, killed = run_processes(4, tmp_path, stopping)
    assert killed is None
    for kind, message in others:
        assert kind == "PeerError"
        assert "rank 3" in message


@pytest.mark.parametrize("number", range(1, 40, 3))
def test_after_an_interrupt_as_processes_meet_all_can_make_another_pipeline(number):
    """Wherever it comes: all count the pipelines alike that they have made."""
    world = World(4)
    interrupted = []

    def watch(rank):
        if (rank, world.operations[rank], interrupted) == (3, number, []):
            interrupted.append(rank)
            raise KeyboardInterrupt

    def job(network):
        groups = grid_of(network, 2)
        layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

        def step(timeout_s):
            pipe = Pipe(layers, [1, 1], **groups, timeout_s=timeout_s)
            return pipe.step(torch.ones(4, 3), torch.ones(4, 3), functional.mse_loss)

        with pytest.raises((PeerError, KeyboardInterrupt)):
            step(5)
        return step(600)

    world.watch = watch
    results = world.run(job)
    assert interrupted
    assert all(isinstance(result, torch.Tensor) for result in results), results


@pytest.mark.parametrize("value", [0, -1.0, nan, inf, 1e-9, 1e12, "5", None])
def test_a_timeout_that_is_no_time(value):
    def job(group):
        return Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], group=group, timeout_s=value)

    for result in run_ranks(2, job):
        assert isinstance(result, ValueError)
        assert f"timeout_s must be a number of seconds between 0.001 and 1e9, got {value!r};" in str(result)
