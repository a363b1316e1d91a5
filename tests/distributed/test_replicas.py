"""Replicas that differ in what seeds (``seeds.py``) draw seldom or never; a real kill ends all processes of a mesh."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from gpipe_bench.distributed import PeerError, Pipe
from tests.distributed.ranks import die, run_processes
from tests.distributed.test_failures import Layer
from tests.distributed.virtual import grid_of, results_of, run_ranks

SIZE = 4
"""Ranks 0 and 1 are a pipeline, 2 and 3 its replica."""


def made(number=1000):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    layers = [nn.Linear(3, 3), nn.Linear(3, 3), Layer(die, number)]
    groups = {"mesh": mesh["pipeline"], "replicas": mesh["data"]}
    return Pipe(nn.Sequential(*layers), [2, 1], chunks=2, checkpoint="never", **groups)


def wide(width):
    return [nn.Sequential(nn.Linear(3, width), nn.Linear(width, 3)), nn.Linear(3, 3), nn.Linear(3, 3)]


@pytest.mark.parametrize(("layers", "balance", "name"), [(wide(4), [1, 2], "balance"), (wide(5), [2, 1], "parameters")])
def test_replicas_that_are_made_otherwise(layers, balance, name):
    def job(network):
        made = (layers, balance) if network.own >= 2 else (wide(4), [2, 1])
        Pipe(nn.Sequential(*copy.deepcopy(made[0])), made[1], **grid_of(network, 2))

    for rank, error in enumerate(run_ranks(4, job)):
        assert isinstance(error, ValueError)
        assert f"{name} must be the same in all processes, got" in str(error)
        assert f"on rank {rank % 2} and" in str(error)
        assert f"on rank {rank % 2 + 2};" in str(error)


def crossed(rank):
    """The replicas of a process have the other partition, or the process has the wrong mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], mesh=mesh["pipeline"], replicas=mesh["pipeline"])


def test_replicas_that_have_other_partitions(tmp_path):
    for kind, message in run_processes(SIZE, tmp_path, crossed):
        assert kind == "ValueError"
        assert "the own partitions must be the same in all processes, got [0] on rank" in message


def weighted(rank):
    pipe = made()
    inputs = torch.ones(4, 3)
    pipe.step(
        inputs, inputs, lambda output, target: (output - target).abs().mean(), reduction=lambda part: 2 * len(part)
    )


def test_a_function_may_say_how_a_loss_is_reduced(tmp_path):
    assert run_processes(SIZE, tmp_path, weighted) == [None] * SIZE


def step(pipe, rows=4, **options):
    pipe.step(torch.ones(rows, 3), torch.ones(rows, 3), functional.mse_loss, **options)


def test_replicas_that_begin_to_differ_change_nothing():
    def job(network):
        """Whether no gradient has changed, and the error."""
        pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], chunks=2, **grid_of(network, 2))
        step(pipe)
        before = [parameter.grad.clone() for parameter in pipe.parameters()]
        try:
            step(pipe, 6 if network.own >= 2 else 4)
        except (ValueError, PeerError) as error:
            after = [parameter.grad for parameter in pipe.parameters()]
            return all(torch.equal(grad, old) for grad, old in zip(after, before, strict=True)), error

    results = results_of(4, job)
    # A process that has not compared yet may hear it from another one.
    assert any(isinstance(error, ValueError) for _, error in results)
    for same, error in results:
        assert "rows must be the same in all processes, got" in str(error)
        assert "make the same calls everywhere" in str(error)
        assert same


def failing(rank):
    pipe = made(6 if rank == 3 else 1000)
    for _ in range(3):
        step(pipe)
    dist.barrier()


def test_a_process_of_one_replica_is_killed(tmp_path):
    results = run_processes(SIZE, tmp_path, failing)
    assert results.pop() is None
    for kind, message in results:
        assert kind == "PeerError"
        assert "rank 3 is gone or silent" in message
