"""Operators, modules, optimizers, autocast and checkpoints give on a virtual device what they give on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpipe_bench.emulator.library import devices
from gpipe_bench.models.table import MODELS
from tests.cover import EVERY_CASE
from tests.emulator.bed.agreement import judge_all, operators, report
from tests.emulator.bed.steps import SMALL

DEVICE = devices(4)[-1]
# Sparse tensors are not supported; tensor_split wants its indices on the CPU, on every accelerator.
KNOWN = {"sparse_sampled_addmm", "sparse_mm_reduce", "tensor_split"}
LOOSE = {"rtol": 1e-3, "atol": 1e-5}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adam, one by one": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
}


def moved(model):
    return copy.deepcopy(model).to(DEVICE)


def test_operators_of_pytorch_agree():
    verdicts = judge_all(operators()[:: 3 if EVERY_CASE else 6])
    wrong = {verdict.operator for verdict in verdicts if verdict.problem is not None}
    assert wrong <= KNOWN, report(verdicts)
    # What nobody compares cannot disagree.
    assert sum(verdict.how == "values" for verdict in verdicts) > 50


def test_every_registered_model_is_compared():
    assert set(MODELS) <= set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_registered_models_agree(name):
    spec = MODELS[name]
    arguments = {**{key: argument.default for key, argument in spec.arguments.items()}, **SMALL[name]}
    if "dropout" in arguments:
        arguments["dropout"] = 0.0
    plain = spec.network(arguments)
    model = moved(plain)
    generator = torch.Generator().manual_seed(1)
    x, target = spec.make_batch(2, arguments, generator)
    losses = [spec.loss(network(x.to(where)), target.to(where)) for network, where in ((plain, "cpu"), (model, DEVICE))]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1].cpu(), losses[0])
    for (key, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad, msg=lambda text, key=key: f"{key}: {text}", **LOOSE)
    for one, other in zip(plain.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(other.cpu(), one)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_agree(name):
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model = moved(plain)
    x = torch.rand(5, 3)
    for network, where in ((plain, "cpu"), (model, DEVICE)):
        optimizer = OPTIMIZERS[name](network.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            network(x.to(where)).square().sum().backward()
            optimizer.step()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.cpu(), one)


def test_autocast():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4)).to(DEVICE)
    x = torch.rand(2, 1, 4, 4, device=DEVICE)
    with torch.autocast("virtual", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("virtual")
        half = model(x)
        whole = torch.softmax(half, 1)
    assert (half.dtype, whole.dtype) == (torch.bfloat16, torch.float32)
    whole[:, 0].sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(half.float(), model(x), rtol=0.05, atol=0.05)


def test_checkpoints_are_saved_and_loaded(tmp_path):
    model = nn.Linear(3, 2).to(DEVICE)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    same = torch.load(tmp_path / "model.pt")
    elsewhere = torch.load(tmp_path / "model.pt", map_location="cpu")
    assert {value.device for value in same.values()} == {DEVICE}
    assert {value.device for value in elsewhere.values()} == {torch.device("cpu")}
    assert all(torch.equal(same[key].cpu(), elsewhere[key]) for key in same)


def test_lazy_conjugation_survives_a_copy():
    x = torch.tensor([1 + 2j, 3 - 1j], device=DEVICE).conj()
    assert x.is_conj()
    assert x.cpu().tolist() == [1 - 2j, 3 + 1j]
    assert x.clone().imag.cpu().tolist() == [-2, 1]
