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


def chain() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(7))).double()


def plain() -> nn.Sequential:
    return crossing_model().eval()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
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


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_way_out_gives_what_the_plain_module_gives(name):
    x = torch.rand(4, 3, dtype=torch.float64)
    # PyTorch's compilers know no generators that return a value, so no skips.
    make = chain if name in {"script", "strict export"} else plain
    for pipe in (GPipe(make(), [2, 2, 3], devices=["cpu"] * 3, chunks=2), Pipe(make(), balance=[2, 2, 3], chunks=2)):
        pipe(x)
        torch.testing.assert_close(TRANSFORMS[name](nn.Sequential(*pipe), x), TRANSFORMS[name](make(), x))


@pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b"])
def test_function_transforms_within_a_layer_are_its_own_affair(schedule):
    class Norm(nn.Module):
        def forward(self, x):
            return torch.func.vmap(torch.nn.functional.normalize)(x[:, None])[:, 0]

    layers = nn.Sequential(nn.Linear(3, 3), Norm(), nn.Linear(3, 1)).double()
    x = torch.rand(4, 3, dtype=torch.float64)
    found = GPipe(layers, [1, 2], devices=["cpu"] * 2, chunks=2, schedule=schedule).step(
        x, x[:, :1], nn.functional.mse_loss
    )
    torch.testing.assert_close(found, nn.functional.mse_loss(layers(x), x[:, :1]).detach())
