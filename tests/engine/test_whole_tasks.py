"""Where the order of a sum of gradients would show who ran the tasks, no graph goes through all partitions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from gpipe_bench.engine import pipeline
from gpipe_bench.skip import pop, skippable, stash
from tests.engine.support import Mix, on_cpu, score

M = 4
BATCHES = 3


class Passing(Mix):
    """(x, y) -> (f(x, y), y): y is used in every partition that it passes, last where a gradient is awaited first."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def forward(self, value):
        x, y = value if isinstance(value, tuple) else (value, None)
        after = 0 if y is None else y.sin() + y
        x = super().forward(x)
        for _ in range(self.depth):
            x = x + 0
        return x + x.cos() + after, x.exp() if y is None else y


class Twice(Mix):
    """Gives out a tensor twice."""

    def forward(self, x):
        x = super().forward(x)
        return x, x


class Thrice(Mix):
    """Uses the first of two tensors three times."""

    def forward(self, value):
        x, y = value if isinstance(value, tuple) else (value, 0)
        return super().forward(x) + x.sin() + x.cos() + y


@skippable(stash=["x"])
class Stashes(Mix):
    """Its output is a skip, too."""

    def forward(self, x):
        x = super().forward(x)
        yield stash("x", x)
        return x


@skippable(pop=["x"])
class Pops(Mix):
    def forward(self, x):
        skip = yield pop("x")
        return super().forward(x) + skip.sin()


MODELS = {
    "passed on": lambda: [Passing(depth) for depth in (0, 30, 3, 0)],
    "twice": lambda: [Twice(), Thrice(), Mix()],
    "skip": lambda: [Stashes(), Thrice(), Pops()],
}


class Settled:
    """A contest that is over."""

    def __init__(self, *, inline: bool) -> None:
        self._inline = inline

    def inline(self) -> bool:
        return self._inline

    def note(self, seconds: float, *, inline: bool) -> None:
        pass


def gradients(layers, forward: bool, backward: bool, **options) -> list[torch.Tensor]:
    """Of three batches, added up; whether the calling thread runs their tasks."""
    options = {"chunks": M, "checkpoint": "never", "backward": "scheduled", **options}
    pipe = on_cpu(nn.Sequential(*copy.deepcopy(layers)), [1] * len(layers), **options)
    contests = Settled(inline=forward), Settled(inline=backward)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.Pipeline, "_contests_of", lambda *_: contests)
        for _ in range(BATCHES):
            score(pipe(torch.linspace(-1, 1, 6 * M).view(2 * M, 3))).backward()
    return [parameter.grad for parameter in pipe.parameters()]


@pytest.mark.parametrize("portals", [True, False])
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_who_runs_the_tasks_shows_in_no_bit(model, forward, portals):
    torch.manual_seed(0)
    layers, components = MODELS[model](), Components(portals=portals)
    expected = gradients(layers, forward=False, backward=False, components=components)
    found = gradients(layers, forward=forward, backward=True, components=components)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
