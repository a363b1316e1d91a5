"""The processes' default generators stay alike, whatever draws, so that their loaders shuffle alike."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

from gpipe_bench.distributed import Pipe
from tests.distributed.ranks import run_processes

SIZE = 2


class Late(nn.Module):
    """Draws on demand, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forwards = self.backwards = False

    def forward(self, x):
        y = self.linear(x)
        if self.backwards and y.requires_grad:
            y.register_hook(lambda grad: grad + torch.rand_like(grad))
        return y * torch.rand(4) if self.forwards else y


def draws(rank):
    """The default generator after each of many kinds of steps, and the weights that were drawn."""
    found = []
    torch.manual_seed(5)

    def note(what):
        found.append((what, torch.get_rng_state()))

    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pipe = Pipe(layers, [3, 1], materialise=lambda each: getattr(each, "reset_parameters", lambda: None)())
    note("materialise")
    weights = {name: weight.detach().clone() for name, weight in pipe.named_parameters()}
    pipe.close()
    for chunks, mode, schedule in ((1, "always", "1f1b"), (4, "always", "1f1b"), (4, "never", "zb_h1")):
        for index in range(SIZE):
            late = nn.Sequential(*(Late() for _ in range(SIZE)))
            pipe = Pipe(late, [1] * SIZE, chunks=chunks, checkpoint=mode, schedule=schedule)
            note((chunks, mode, index, "made"))
            for what in ("nothing", "layer", "loss", "hook"):
                if rank == index:
                    pipe[0].forwards = what == "layer"
                    pipe[0].backwards = what == "hook"
                drawn = what == "loss"
                pipe.step(
                    torch.ones(8, 4),
                    torch.ones(8, 4),
                    lambda y, _, drawn=drawn: (y + torch.rand_like(y) if drawn else y).square().mean(),
                    reduction="mean",
                )
                note((chunks, mode, index, what))
            with torch.no_grad():
                if rank == index:
                    pipe[0].forwards = True
                pipe(torch.ones(8, 4))
            note((chunks, mode, index, "evaluation"))
            pipe.close()
    return found, weights


def test_generators_are_alike_after_every_step_whatever_drew(tmp_path):
    (first, weights), (second, others) = run_processes(SIZE, tmp_path, draws)
    torch.manual_seed(5)
    assert torch.equal(first[0][1], torch.get_rng_state())
    assert [what for what, *_ in first] == [what for what, *_ in second]
    assert [what for (what, one), (_, two) in zip(first, second, strict=True) if not torch.equal(one, two)] == []
    # All but the steps in which nothing drew have moved them.
    still = [what for (_, before), (what, after) in pairwise(first) if torch.equal(before, after)]
    assert still == [what for what, *_ in first if what[-1] == "nothing"]
    drawn = [weight for name, weight in {**weights, **others}.items() if name.endswith("weight")]
    assert len({tuple(weight.flatten().tolist()) for weight in drawn}) == 4


def loaded(rank):
    """The rows that shuffled loaders give in two epochs, whose batches are of several sizes."""
    torch.manual_seed(5)
    size = torch.distributed.get_world_size()
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(size + 1)))
    options = {"chunks": 4, "schedule": "1f1b", "checkpoint": "always"}
    pipe = Pipe(layers, [2, *[1] * (size - 1)], materialise=reset, **options)
    data = TensorDataset(torch.arange(27.0)[:, None].expand(27, 4))
    rows = []
    training, testing = random_split(data, [22, 5])
    for _ in range(2):
        for (x,) in DataLoader(training, batch_size=7, shuffle=True):
            rows += x[:, 0].tolist()
            pipe.step(x if rank == 0 else None, x if rank == size - 1 else None, functional.mse_loss)
            pipe.clip_grad_norm_(1.0)
        for (x,) in DataLoader(testing, batch_size=5, shuffle=True):
            rows += x[:, 0].tolist()
            with torch.no_grad():
                pipe(x if rank == 0 else None)
    return rows, torch.get_rng_state()


def reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@pytest.mark.parametrize("size", [2, 3])
def test_loaders_with_one_seed_give_the_same_rows(size, tmp_path):
    (rows, state), *others = run_processes(size, tmp_path, loaded)
    assert sorted(rows[:27]) == [float(row) for row in range(27)]
    assert rows[:27] != rows[27:]
    assert all(found == rows and torch.equal(end, state) for found, end in others)
