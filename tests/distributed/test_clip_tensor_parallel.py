"""``clip_grad_norm_`` with layers on a mesh of pipeline x tensor, some of whose parameters are DTensors."""

from __future__ import annotations

from math import inf

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from gpipe_bench.distributed import Pipe
from tests.distributed.ranks import run_processes
from tests.distributed.test_tensor_parallel import PLANS, batch, made, whole

NORMS = (2.0, 1.0, 3.0, 0.5, inf)


def stepped(mesh, name):
    pipe = Pipe(made(name, mesh["tensor"]), [2, 2], chunks=2, mesh=mesh["pipeline"], timeout_s=60)
    pipe.step(*batch(), functional.mse_loss)
    return pipe


def on_a_mesh(name):
    """The layers without a pipeline after the same micro-batches, on the mesh of each stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    alone = made(name, mesh["tensor"])
    for x, y in zip(*(each.chunk(2) for each in batch()), strict=True):
        (functional.mse_loss(alone(x), y) / 2).backward()
    return mesh, alone


def each_norm(pipe):
    """Every norm, with the gradients of one step."""
    grads = [(each, None if each.grad is None else each.grad.clone()) for each in pipe.parameters()]
    for norm_type in NORMS:
        for each, grad in grads:
            each.grad = None if grad is None else grad.clone()
        yield norm_type
    pipe.close()


def clipped(_):
    """For each plan and norm what differs from the same gradients in whole tensors, which one process would clip."""
    return [wrong for name in PLANS for wrong in clipped_with(name)]


def clipped_with(name):
    mesh, alone = on_a_mesh(name)
    grads = {key: whole(each.grad).clone() for key, each in alone.named_parameters()}
    wrong, pipe = [], stepped(mesh, name)
    for norm_type in each_norm(pipe):
        plain = [nn.Parameter(grad.clone()) for grad in grads.values()]
        for each, grad in zip(plain, grads.values(), strict=True):
            each.grad = grad.clone()
        expected = nn.utils.clip_grad_norm_(plain, 0.01, norm_type)
        total = pipe.clip_grad_norm_(0.01, norm_type)
        pairs = {"norm": (total, expected)}
        there = dict(zip(grads, plain, strict=True))
        pairs |= {key: (each.grad, there[key].grad) for key, each in pipe.named_parameters()}
        # The parts of a sharded gradient are summed up apart.
        wrong += [
            (name, norm_type, key)
            for key, (one, other) in pairs.items()
            if not torch.allclose(whole(one), other, rtol=1e-12, atol=0)
        ]
    return wrong


def bits(_):
    """As above, if all parameters are DTensors: PyTorch clips these itself, with the same bits."""
    mesh, alone = on_a_mesh("sequence")
    before = [each.grad.clone() for each in alone.parameters()]
    wrong, pipe = [], stepped(mesh, "sequence")
    for norm_type in each_norm(pipe):
        for each, grad in zip(alone.parameters(), before, strict=True):
            each.grad = grad.clone()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.01, norm_type)
        total, there = pipe.clip_grad_norm_(0.01, norm_type), dict(alone.named_parameters())
        pairs = {key: (each.grad, there[key].grad) for key, each in pipe.named_parameters()} | {
            "norm": (total, expected)
        }
        wrong += [(norm_type, key) for key, (one, other) in pairs.items() if not torch.equal(whole(one), whole(other))]
    return wrong


def test_gradients_are_clipped_by_the_norm_of_the_whole_tensors(tmp_path):
    assert run_processes(4, tmp_path, clipped) == [[]] * 4


def test_the_bits_of_the_layers_without_a_pipeline(tmp_path):
    assert run_processes(4, tmp_path, bits) == [[]] * 4
