"""Tensor-parallel layers in a pipeline, on a mesh of both: a stage may hand on what a collective has not filled yet."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Shard
from torch.nn import functional

from gpipe_bench.distributed import Pipe
from gpipe_bench.skip import pop, skippable, stash
from tests.distributed.ranks import run_processes
from tests.engine.steps import DOUBLE

WIDTH, LENGTH = 128, 32
"""Large enough that a collective is still under way when the layer returns."""
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "interleaved")


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


class Gated(Mlp):
    """Hands on a tuple in a dict, both unfinished."""

    def forward(self, x):
        y = super().forward(x)
        return {"pair": (y, super().forward(y))}


class Joined(nn.Module):
    def forward(self, value):
        one, other = value["pair"]
        return one * torch.sigmoid(other)


@skippable(stash=["unfinished"])
class Stashing(Mlp):
    def forward(self, x):
        y = super().forward(x)
        yield stash("unfinished", y)
        return y


@skippable(pop=["unfinished"])
class Popping(nn.Module):
    def forward(self, x):
        skip = yield pop("unfinished")
        return x * skip


def megatron(layer, mesh, **down):
    if hasattr(layer, "up"):
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(**down)})


def gathered_columns(layer, mesh):
    """Both linear layers give all columns, which an all-gather collects."""
    plan = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("up", "down")}
    parallelize_module(layer, mesh, plan)


def sequence(layer, mesh):
    """The norm works on a part of the sequence, the rest on all of it; a layer gives all of it, as it gets it."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    inputs = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
    parallelize_module(layer, mesh, {**plan, "": inputs})


PLANS = {
    "megatron": (lambda: nn.Sequential(*(Mlp() for _ in range(4))), megatron),
    "columns": (lambda: nn.Sequential(*(Mlp() for _ in range(4))), gathered_columns),
    "sequence": (lambda: nn.Sequential(*(Mlp() for _ in range(4))), sequence),
    "tuples": (lambda: nn.Sequential(Mlp(), Gated(), Joined(), Mlp()), megatron),
    "skips": (lambda: nn.Sequential(Stashing(), Mlp(), Mlp(), Popping()), megatron),
}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else torch.as_tensor(tensor)


def made(name, mesh):
    torch.manual_seed(0)
    model, (_, parallelise) = PLANS[name][0]().double(), PLANS[name]
    for layer in model:
        parallelise(layer, mesh)
    return model


def batch():
    torch.manual_seed(1)
    return torch.rand(8, LENGTH, WIDTH, dtype=torch.float64), torch.rand(8, LENGTH, WIDTH, dtype=torch.float64)


def compared(_):
    """For each plan and schedule, with checkpoints in half of them, what differs from the layers without a pipeline."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    wrong = []
    for row, name in enumerate(PLANS):
        for column, schedule in enumerate(SCHEDULES):
            checkpoint = "never" if (row + column) % 2 else "always"
            alone, layers = made(name, mesh["tensor"]), made(name, mesh["tensor"])
            (x, y), ours = batch(), batch()[0].requires_grad_()
            x.requires_grad_()
            value = functional.mse_loss(alone(x), y)
            value.backward()
            options = {"schedule": schedule, "checkpoint": checkpoint, "chunks": 4}
            balance = [1, 1, 1, 1] if schedule in DOUBLE else [2, 2]
            pipe = Pipe(layers, balance, mesh=mesh["pipeline"], timeout_s=60, **options)
            loss, output = pipe.step(ours, y, functional.mse_loss, return_output=True)
            expected = {key: each.grad for key, each in alone.named_parameters()}
            pairs = {key: (each.grad, expected[key]) for key, each in pipe.named_parameters()}
            pairs["loss"] = loss, value.detach()
            if pipe.rank == 0:
                pairs["input"] = ours.grad, x.grad
            else:
                pairs["output"] = output, alone(x).detach()
            with torch.no_grad():
                evaluated = pipe(ours.detach())
            if pipe.rank == 1:
                pairs["evaluation"] = evaluated, alone(x).detach()
            for key, (found, there) in pairs.items():
                if not torch.allclose(whole(found), whole(there), rtol=1e-9, atol=1e-12):
                    wrong.append((name, schedule, checkpoint, key))
            pipe.close()
    return wrong


def test_gradients_are_those_of_the_layers_without_a_pipeline(tmp_path):
    assert run_processes(4, tmp_path, compared) == [[]] * 4


def refused(_):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    layers = nn.Sequential(Mlp(), Mlp())
    for layer in layers:
        megatron(layer, mesh["tensor"], output_layouts=Replicate(), use_local_output=False)
    pipe = Pipe(layers, [1, 1], mesh=mesh["pipeline"], timeout_s=60)
    try:
        pipe.step(torch.rand(2, WIDTH), torch.rand(2, WIDTH), functional.mse_loss)
    finally:
        dist.barrier()


def test_a_tensor_of_a_mesh_is_refused(tmp_path):
    for rank, (kind, message) in enumerate(run_processes(4, tmp_path, refused)):
        assert kind == ("TypeError" if rank < 2 else "PeerError")
        assert "tensors between processes must be plain, dense or sparse, got a DTensor; hand on plain" in message
