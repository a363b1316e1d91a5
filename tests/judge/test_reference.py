"""The reference trains as the engine does, to the bit: every schedule, with skips, checkpoints and random numbers."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe
from gpipe_bench.judge.reference import Pipeline
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.table import device_count
from gpipe_bench.skip import peek, pop, skippable, stash

# Rows of 64 bytes: a copy of a micro-batch is then aligned as the micro-batch is, and kernels round alike.
WIDTH = 16
SIZES = [(2, 3), (4, 1), (4, 4), (4, 5), (6, 4)]  # partitions, micro-batches
LENGTH = 300


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Noise(Block):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.3)


class Counts(Block):
    """Has buffers that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(super().forward(x))


@skippable(stash=["a"])
class StashA(Noise):
    def forward(self, x):
        y = Noise.forward(self, x)
        yield stash("a", y)
        return y


@skippable(stash=["b"])
class StashB(Block):
    def forward(self, x):
        y = Block.forward(self, x)
        yield stash("b", y * 2)
        return y


@skippable(peek=["a"])
class PeekA(Counts):
    def forward(self, x):
        return Counts.forward(self, x) * (yield peek("a"))


@skippable(pop=["a"])
class PopA(Block):
    def forward(self, x):
        return Block.forward(self, x) * (yield pop("a"))


@skippable(pop=["b"])
class PopB(Block):
    def forward(self, x):
        return Block.forward(self, x) + (yield pop("b"))


def skips(n):
    """Skips that cross, one of which is a value, too, and is read on the way."""
    return nn.Sequential(StashA(), StashB(), *[Counts() for _ in range(n - 5)], PeekA(), PopA(), PopB())


def chain(n):
    return nn.Sequential(*[Noise() if j % 2 else Counts() for j in range(n)])


def trained(model, step):
    """Losses, gradients, buffers and the generator after two steps on 14 rows."""
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(14, WIDTH, generator=generator) for _ in range(2))
    torch.manual_seed(5)
    losses = [step(x, target, nn.functional.mse_loss) for _ in range(2)]
    return {
        **{f"loss {k}": loss for k, loss in enumerate(losses)},
        **{f"grad {name}": p.grad for name, p in model.named_parameters()},
        **{f"buffer {name}": buffer for name, buffer in model.named_buffers()},
        "next number": torch.rand(1),
    }


def pipes(make, name, mode, n, m):
    """A model in the reference, and a model in the engine."""
    for kind in ("reference", "engine"):
        torch.manual_seed(3)
        model = make(n)
        balance = [1 + (len(model) - n) * (j == n // 2) for j in range(n)]
        if kind == "reference":
            yield model, Pipeline(model, balance, m, mode, name)
            continue
        devices = ["cpu"] * device_count(name, n)
        # One thread at a time draws random numbers, as in the plain module.
        components = Components(clock_cycle=False)
        yield (
            model,
            GPipe(model, balance, devices=devices, chunks=m, checkpoint=mode, schedule=name, components=components),
        )


@pytest.mark.parametrize("make", [skips, chain])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_trains_as_the_engine_to_the_bit(name, mode, size, make):
    found, expected = (trained(model, pipe.step) for model, pipe in pipes(make, name, mode, *size))
    # The engine updates statistics again in a recomputation, as its documentation says.
    left_out = "buffer" if mode != "never" else "nothing"
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value) or key.startswith(left_out), key


@pytest.mark.parametrize("mode", ["always", "except_last"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_recomputation_leaves_buffers_and_generator_as_they_are(name, mode):
    (model, with_checkpoints), _ = pipes(skips, name, mode, 4, 4)
    (other, without), _ = pipes(skips, name, "never", 4, 4)
    found, expected = trained(model, with_checkpoints.step), trained(other, without.step)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", SCHEDULES)
def test_evaluates_as_the_engine_to_the_bit(name):
    outputs = []
    for model, pipe in pipes(skips, name, "always", 4, 3):
        model.eval()
        with torch.no_grad():
            outputs.append(getattr(pipe, "evaluate", pipe)(torch.ones(10, WIDTH)))
    assert torch.equal(*outputs)


def test_a_checkpoint_frees_its_graph():
    (_, pipe), _ = pipes(chain, "gpipe", "always", 2, 3)
    kept = []
    run = pipe.do
    pipe.do = lambda action: (run(action), kept.append({cell: bool(c.outputs) for cell, c in pipe.cells.items()}))
    pipe.step(torch.ones(6, WIDTH), torch.ones(6, WIDTH), nn.functional.mse_loss)
    assert len(kept) == 12
    assert not any(any(cells.values()) for cells in kept)


def test_the_reference_fits_on_a_page():
    assert len(inspect.getsource(inspect.getmodule(Pipeline)).splitlines()) <= LENGTH
