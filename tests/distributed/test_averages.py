"""What replicas average: gradients as one process would, of whatever type, and only where a replica has one."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from gpipe_bench.distributed import Pipe
from tests.distributed.ranks import run_processes

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


class Drawn(nn.Module):
    """Each parameter is used where the first row of the input says so: in both replicas, in one, or in none."""

    def __init__(self, draw):
        super().__init__()
        self.weights = nn.ParameterList()
        for _ in range(4):
            kind, dtype = draw.choice([(), (3,), (2, 3), (0, 2)]), draw.choice(TYPES)
            self.weights.append(nn.Parameter(torch.rand(kind).to(dtype), requires_grad=draw.random() < 0.9))
        self.weights.append(torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.users = [draw.sample([0, 1], draw.randint(0, 2)) for _ in self.weights]
        self.register_buffer("short", torch.tensor([draw.randint(0, 99)], dtype=torch.int16))
        self.register_buffer("mask", torch.tensor(draw.random() < 0.5))

    def forward(self, x):
        for weight, users in zip(self.weights, self.users, strict=True):
            if int(x[0, 0]) in users:
                used = weight.real.double() + weight.imag.double() * 2 if weight.is_complex() else weight.double()
                x = x + used.sum() * x[:, 1:2]
        return x


def model(seed):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    return nn.Sequential(*(Drawn(draw) for _ in range(4)))


def data(replica):
    """Rows whose first number stays that of the replica, since the layers add the same to all, times nothing."""
    x = torch.rand(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(replica))
    x[:, 0], x[:, 1] = replica, 1e-9
    return x


def averages(seed):
    """What both replicas should have: the mean of their gradients, or None."""
    found = []
    for replica in (0, 1):
        plain = model(seed)
        for rows in data(replica).chunk(2):
            (plain(rows).square().mean() / 2).backward()
        found.append([weight.grad for weight in plain.parameters()])
    return {
        name: None if one is other is None else sum(grad / 2 for grad in (one, other) if grad is not None)
        for (name, _), one, other in zip(model(seed).named_parameters(), *found, strict=True)
    }


def averaged(rank, seed, schedule, balance):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    groups = {"mesh": mesh["pipeline"], "replicas": mesh["data"]}
    # The second replica gets the buffers of the first one.
    layers = model(seed)
    if rank >= 2:
        for buffer in layers.buffers():
            buffer.zero_()
    pipe = Pipe(layers, balance, chunks=2, schedule=schedule, **groups)
    x = data(rank // 2)
    pipe.step(x, x, lambda output, _: output.square().mean(), reduction="mean")
    return {name: weight.grad for name, weight in pipe.named_parameters()}, dict(pipe.named_buffers())


@pytest.mark.parametrize(
    ("seed", "schedule", "balance"),
    [
        (0, "1f1b", [2, 2]),
        (1, "gpipe", [1, 3]),
        (2, "zb_h1", [2, 2]),
        (3, "interleaved", [1] * 4),
        (4, "zb_v", [1] * 4),
    ],
)
def test_gradients_of_all_types_and_none_where_no_replica_has_one(seed, schedule, balance, tmp_path):
    expected, buffers = averages(seed), dict(model(seed).named_buffers())
    results = run_processes(4, tmp_path, averaged, seed, schedule, balance)
    assert {name for grads, _ in results for name in grads} == {*expected}
    for grads, own in results:
        for name, grad in grads.items():
            if expected[name] is None:
                assert grad is None
            else:
                torch.testing.assert_close(grad, expected[name])
                assert grad.dtype == expected[name].dtype
        assert all(torch.equal(value, buffers[name]) for name, value in own.items())


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float16))

    def forward(self, x):
        return x * self.weight


def large(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "pipeline"))
    pipe = Pipe(nn.Sequential(Scale()), [1], mesh=mesh["pipeline"], replicas=mesh["data"])
    pipe.step(
        torch.full((1, 1), 4e4, dtype=torch.float16), torch.zeros(1), lambda output, _: output.sum(), reduction="sum"
    )
    return pipe[0].weight.grad


def test_a_mean_of_large_gradients_does_not_overflow(tmp_path):
    assert all(
        torch.equal(grad, torch.tensor([4e4], dtype=torch.float16)) for grad in run_processes(2, tmp_path, large)
    )


def refused(rank, layers):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "pipeline"))
    pipe = Pipe(layers, [len(layers)], mesh=mesh["pipeline"], replicas=mesh["data"], timeout_s=20)
    pipe.step(torch.ones(2, dtype=torch.long), torch.ones(2, 3), functional.mse_loss)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.eye(3).to_sparse())

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ([nn.Embedding(3, 3, sparse=True)], "0.weight"),
        ([nn.Embedding(3, 3), Sparse()], "1.edges"),
    ],
)
def test_what_cannot_be_averaged_is_named_and_no_peer_is_accused(layers, name, tmp_path):
    for _, message in run_processes(2, tmp_path, refused, nn.Sequential(*layers)):
        assert f"must be dense tensors or DTensors, got '{name}', which is torch.sparse_coo" in message
        assert "gone" not in message
        assert "silent" not in message


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def tensor_parallel(rank):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "pipeline", "tensor"))
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block())
    layers, x, y = copy.deepcopy(plain), torch.rand(16, 8), torch.rand(16, 8)
    functional.mse_loss(plain(x), y).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    for each in layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "unused": ColwiseParallel()}
        parallelize_module(each, mesh["tensor"], plan)
    # The replicas begin with the weights of the first one.
    if mesh["data"].get_local_rank():
        for weight in layers.parameters():
            weight.data.to_local().zero_()
    pipe = Pipe(layers, [1, 1], chunks=2, mesh=mesh["pipeline"], replicas=mesh["data"])
    part = slice(8, 16) if mesh["data"].get_local_rank() else slice(8)
    pipe.step(x[part], y[part], functional.mse_loss)
    torch.testing.assert_close(pipe.clip_grad_norm_(0.1), norm)
    expected = dict(plain.named_parameters())
    for name, weight in pipe.named_parameters():
        if expected[name].grad is None:
            assert weight.grad is None
        else:
            torch.testing.assert_close(weight.grad.full_tensor(), expected[name].grad)
    dist.barrier()
    return "right"


def test_tensor_parallel_layers_are_averaged_over_the_replicas_alone(tmp_path):
    assert run_processes(8, tmp_path, tensor_parallel) == ["right"] * 8
