"""The processes' default generators stay alike, whatever draws, so that their loaders shuffle alike."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

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
