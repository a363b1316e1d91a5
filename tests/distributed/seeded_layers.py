"""Layers, an optimizer and a loss whose numbers are whole: float64 holds every sum exactly.

So a pipeline equals the plain module bit for bit in whatever order it adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from gpipe_bench.skip import peek, pop, skippable, stash

WIDTH = 4
Probe = Callable[[str], None]
"""Called by a layer in each pass, and by the loss."""


class Watched(Function):
    """The identity; calls the probe backward, and may draw a random number there, which it does not use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probe: Probe, draws: bool) -> Tensor:
        ctx.probe, ctx.draws = probe, draws
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.probe("backward")
        if ctx.draws:
            torch.rand(3)
        return grad, None, None


def small(x: Tensor) -> Tensor:
    """x - 16 k, between -8 and 8."""
    return x - (x.detach() / 16).round() * 16


class Layer(nn.Module):
    """(rows, 4), or a tuple or dict that holds it -> the same in a form of its own.

    Args:
        weight: of the layer; on ``meta`` it has no values before ``reset_parameters``.
        values: of the weight.
        form: of the output.
        draws: the pass in which it draws a random number.
        probe: called in each pass.
    """

    def __init__(self, weight: nn.Parameter, values: Tensor, form: str, draws: str, probe: Probe) -> None:
        super().__init__()
        self.weight, self.values, self.form, self.draws, self.probe = weight, values, form, draws, probe

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(self.values)

    def forward(self, values: Any) -> Any:
        self.probe("forward")
        if self.draws == "forward":
            torch.rand(2)
        y = nn.functional.linear(small(tensor_of(values)), self.weight)
        if isinstance(values, tuple) and values[1] is not None:
            y = y + values[1][:, None]
        y = Watched.apply(torch.where(y > 0, y, 2 * y), self.probe, self.draws == "backward")
        if self.form == "tuple":
            return y, (y.detach()[:, 0] > 0).long(), "text"
        if self.form == "none":
            return y, None, 1
        return {"x": y, "mask": y.detach() > 0} if self.form == "dict" else y


def tensor_of(values: Any) -> Tensor:
    found: Tensor = values["x"] if isinstance(values, dict) else values[0] if isinstance(values, tuple) else values
    return found


def with_tensor(values: Any, x: Tensor) -> Any:
    """The same values with another tensor in the place of :func:`tensor_of`."""
    if isinstance(values, dict):
        return values | {"x": x}
    return (x, *values[1:]) if isinstance(values, tuple) else x


class Norm(nn.Module):
    """Adds the rounded output of batch normalization, through which no gradient flows: so all numbers stay whole.

    Attributes:
        norm: sees each row twice, since one row alone has no variance.
        gathered: what it has seen of a batch, if the reference updates its statistics at the end of the batch.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.5, device=device, dtype=torch.float64)
        self.gathered: list[Tensor] | None = None

    def forward(self, values: Any) -> Any:
        x = tensor_of(values)
        seen = x.detach()[..., None].expand(-1, -1, 2)
        if self.gathered is None or not self.training:
            found = self.norm(seen)
        else:
            self.gathered.append(seen)
            norm = self.norm
            found = nn.functional.batch_norm(seen, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)
        # No number of the statistics is near to where these numbers are rounded up or down.
        return with_tensor(values, x + (found.detach()[..., 0] * 1.618 + 0.371).round())

    def commit(self) -> None:
        """Let the statistics be those of all that was gathered."""
        if self.gathered:
            self.norm(torch.cat(self.gathered))
            self.gathered.clear()


@skippable(stash=["skip"])
class Keeps(nn.Module):
    def forward(self, values: Any) -> Any:
        yield stash("skip", tensor_of(values) * 1)
        return values


@skippable(pop=["skip"])
class Adds(nn.Module):
    def forward(self, values: Any) -> Any:
        skip = yield pop("skip")
        return small(tensor_of(values)) + small(skip)


@skippable(peek=["skip"])
class Looks(nn.Module):
    def forward(self, values: Any) -> Any:
        skip = yield peek("skip")
        return small(tensor_of(values)) - small(skip)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


class Signs(torch.optim.Optimizer):
    """Steps by the sign of gradient and momentum, in place: whole weights stay whole and small."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # PyTorch finds tied weights in a checkpoint by a setting of the optimizer: without one it finds none.
        super().__init__(parameters, {"lr": 1.0})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["momentum"] = torch.zeros_like(weight, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    momentum = self.state[weight]["momentum"]
                    momentum.add_(weight.grad.sign()).clamp_(-3, 3)
                    weight.sub_(momentum.sign()).clamp_(-2, 2)
