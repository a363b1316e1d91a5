"""Replicas that differ, or of which one fails: all processes of the mesh end with an error that names the cause."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from gpipe_bench.distributed import Pipe
from tests.distributed.ranks import die, run_processes
from tests.distributed.test_failures import BoomError, Layer

SIZE = 4
"""Ranks 0 and 1 are a pipeline, 2 and 3 its replica."""


def made(burn=None, number=6, frozen=None, balance=(2, 1), width=3, **options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    layers = [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, width), nn.Linear(width, 3)), nn.Linear(3, 3)]
    if burn is not None:
        layers[2] = Layer(burn, number)
    if frozen is not None:
        layers[frozen].requires_grad_(False)
    groups = {"mesh": mesh["pipeline"], "replicas": mesh["data"]}
    return Pipe(nn.Sequential(*layers), balance, chunks=2, checkpoint="never", **groups, **options)


def step(pipe, rows=4, **options):
    pipe.step(torch.ones(rows, 3), torch.ones(rows, 3), functional.mse_loss, **options)


def different(rank, options):
    """The replica is made with other arguments."""
    made(**options if rank >= 2 else {})


@pytest.mark.parametrize(
    ("options", "name"),
    [({"frozen": 0}, "parameters"), ({"balance": (1, 2)}, "balance"), ({"width": 5}, "parameters")],
)
def test_replicas_that_differ(options, name, tmp_path):
    for rank, (kind, message) in enumerate(run_processes(SIZE, tmp_path, different, options)):
        assert kind == "ValueError"
        assert f"{name} must be the same in all processes, got" in message
        assert f"on rank {rank % 2} and" in message
        assert f"on rank {rank % 2 + 2};" in message


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


def evaluate(pipe):
    with torch.no_grad():
        pipe(torch.ones(4, 3))


def freeze(pipe):
    next(pipe.parameters()).requires_grad_(False)


CHANGES = {
    "parameters": freeze,
    "rows": lambda pipe: step(pipe, 6),
    "modes of layers": lambda pipe: pipe[0].eval(),
    "gradients before this step": lambda pipe: pipe.zero_grad(),
    "reduction": lambda pipe: step(pipe, reduction="sum"),
    "grad mode": lambda pipe: torch.set_grad_enabled(False),
    "calls of pipe(x) before this step": evaluate,
    "the call": lambda pipe: pipe.clip_grad_norm_(1.0),
    "max_norm": lambda pipe: pipe.clip_grad_norm_(2.0),
}
"""What a replica does before a step of both, by what the error names."""


def differing(rank, name):
    """The error of a step, and whether a gradient has changed in it."""
    pipe = made(timeout_s=20)
    step(pipe)
    before = [parameter.grad.clone() for parameter in pipe.parameters()]
    try:
        if rank >= 2:
            CHANGES[name](pipe)
        elif name == "max_norm":
            pipe.clip_grad_norm_(1.0)
        step(pipe)
    except Exception as error:  # noqa: BLE001 - it is a result
        cleared = name == "gradients before this step" and rank >= 2
        after = [parameter.grad for parameter in pipe.parameters()]
        same = all(grad is None if cleared else torch.equal(grad, old) for grad, old in zip(after, before, strict=True))
        return type(error).__name__, str(error), same
    return None


@pytest.mark.parametrize("name", CHANGES)
def test_replicas_that_begin_to_differ_are_named_before_anything_runs(name, tmp_path):
    results = run_processes(SIZE, tmp_path, differing, name)
    # A process that has not compared yet may hear it from another one.
    assert {"ValueError"} <= {kind for kind, *_ in results} <= {"ValueError", "PeerError"}
    for _, message, same in results:
        assert f"{name} must be the same in all processes, got" in message
        assert "make the same calls everywhere" in message
        assert same


def fail():
    raise BoomError("by accident")


def no_pipeline(rank):
    """The processes of the replica do not agree."""
    made(schedule="gpipe" if rank == 3 else "1f1b")


def failing(rank, burn):
    pipe = made(burn if rank == 3 else fail, 6 if rank == 3 else 1000)
    for _ in range(3):
        step(pipe)
    dist.barrier()


@pytest.mark.parametrize(
    ("burn", "cause"),
    [(fail, "rank 3 failed at B(0,1): BoomError: by accident"), (die, "rank 3 is gone or silent")],
)
def test_a_process_of_one_replica_fails(burn, cause, tmp_path):
    results = run_processes(SIZE, tmp_path, failing, burn)
    results.pop()
    for kind, message in results:
        assert kind == "PeerError"
        assert cause in message


def test_a_replica_that_cannot_be_made(tmp_path):
    results = run_processes(SIZE, tmp_path, no_pipeline)
    assert [kind for kind, _ in results] == ["PeerError", "PeerError", "ValueError", "ValueError"]
    assert all("schedule must be the same in all processes, got 1f1b on rank 2 and" in text for _, text in results)
