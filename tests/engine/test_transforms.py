"""Export and function transforms: refused by a pipeline, with the way out, which is right."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from gpipe_bench import GPipe, Pipe
from gpipe_bench.errors import UnsupportedError
from tests.engine.support import crossing_model

WAYS = [(None, "always"), (None, "never"), ("gpipe", "always"), ("gpipe", "never")]


def forward_mode(model, x):
    with forward_ad.dual_level():
        found = model(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(getattr(found, "local_value", lambda: found)()).tangent


def in_weights(model, x):
    with forward_ad.dual_level():
        weight = next(model.parameters())
        dual = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        return forward_ad.unpack_dual(torch.func.functional_call(model, {"0.linear.weight": dual}, (x,))).tangent


TRANSFORMS = {
    "export": lambda model, x: torch.export.export(model, (x,)).module()(x),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).module()(x),
    "grad": lambda model, x: torch.func.grad(lambda y: model(y).sum())(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x[None]),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "hessian": lambda model, x: torch.func.hessian(lambda y: model(y).sum())(x),
    "trace": lambda model, x: torch.jit.trace(model, x, check_trace=False)(x),
    "script": lambda model, x: torch.jit.script(model)(x),
    "forward mode": forward_mode,
    "forward mode, in a weight": in_weights,
}


# PyTorch's own transforms use it. The warning is a FutureWarning since 2.15.
JIT = [f"ignore:.*torch.jit.* is deprecated:{kind}" for kind in ("DeprecationWarning", "FutureWarning")]


def chain() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(7))).double()


def plain() -> nn.Sequential:
    return crossing_model().eval()


@pytest.mark.filterwarnings(*JIT, "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("schedule", "checkpoint"), WAYS)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("training", [True, False])
def test_a_pipeline_is_refused_with_the_way_out(name, schedule, checkpoint, training):
    options = {"chunks": 2, "schedule": schedule, "checkpoint": checkpoint}
    x = torch.rand(4, 3, dtype=torch.float64)
    pipes = [GPipe(crossing_model(), [2, 2, 3], devices=["cpu"] * 3, **options)]
    if name not in {"vmap", "jvp", "jacrev", "strict export"}:
        pipes.append(Pipe(crossing_model(), balance=[2, 2, 3], **options))
    for pipe in pipes:
        with pytest.raises(Exception, match=r"nn\.Sequential\(\*pipe\)") as caught:
            TRANSFORMS[name](pipe.train(training), x)
        assert isinstance(caught.value, UnsupportedError) or name == "strict export"


@pytest.mark.filterwarnings(*JIT, "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_way_out_gives_what_the_plain_module_gives(name):
    x = torch.rand(4, 3, dtype=torch.float64)
    # PyTorch's compilers know no generators that return a value, so no skips.
    make = chain if name in {"script", "strict export"} else plain
    for pipe in (GPipe(make(), [2, 2, 3], devices=["cpu"] * 3, chunks=2), Pipe(make(), balance=[2, 2, 3], chunks=2)):
        pipe(x)
        torch.testing.assert_close(TRANSFORMS[name](nn.Sequential(*pipe), x), TRANSFORMS[name](make(), x))


WITHIN = {
    "vmap": torch.func.vmap(lambda row: row / row.norm()),
    "jvp": lambda x: torch.func.jvp(torch.tanh, (x,), (x,))[1],
    "hessian": torch.func.vmap(torch.func.hessian(lambda row: row.tanh().prod())),
}


class Transformed(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(3, 3), name

    def forward(self, x):
        return x + WITHIN[self.name](self.linear(x)).reshape(len(x), -1)[:, :3]


# PyTorch's own, where it takes forward-mode derivatives for the first time.
@pytest.mark.filterwarnings(*JIT)
@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b"])
def test_function_transforms_within_layers_of_all_partitions(name, schedule):
    """Levels of forward-mode derivatives belong to the process, so tasks that use them must not run at once."""
    layers = nn.Sequential(*(Transformed(name) for _ in range(4))).double()
    x = torch.rand(16, 3, dtype=torch.float64)
    expected = torch.stack([layers(part).square().sum() for part in x.chunk(8)]).sum().detach()
    pipe = GPipe(layers, [1] * 4, devices=["cpu"] * 4, chunks=8, schedule=schedule)
    for _ in range(3):
        found = pipe.step(x, x, lambda output, _: output.square().sum(), reduction="sum")
        torch.testing.assert_close(found, expected)
