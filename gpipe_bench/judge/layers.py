"""The layers of the cases: each does one thing that engines were found to get wrong."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.judge.pipes import mesh_of
from gpipe_bench.judge.protocol import Setup
from gpipe_bench.skip import pop, skippable, stash

WIDTH = 6


class Block(nn.Module):
    """Linear and tanh, which counts its forward passes. Takes and gives (N, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return torch.tanh(self.linear(x)) * 1.0


def stashing(name: str, *, same: bool = False) -> nn.Module:
    """A block that stashes its output under a name; the very tensor that goes on (``same``), or a copy."""

    @skippable(stash=[name])
    class Stashing(Block):
        def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
            y = Block.forward(self, x)
            yield stash(name, y if same else y.clone())
            return y

    layer: nn.Module = Stashing()
    return layer


def popping(name: str) -> nn.Module:
    """A block that multiplies its output by a skip."""

    @skippable(pop=[name])
    class Popping(Block):
        def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
            skip = yield pop(name)
            return Block.forward(self, x) * skip

    layer: nn.Module = Popping()
    return layer


class Many(Block):
    """Takes and gives (x, mask, index): a mask of floats and integers travel with the value."""

    def forward(self, x: Any) -> Any:
        x, mask, index = x
        return super().forward(x) * mask + index.to(x.dtype).unsqueeze(-1), mask, index


class Merge(Block):
    """Takes (x, mask, index), gives a tensor."""

    def forward(self, x: Any) -> Any:
        x, mask, _ = x
        return super().forward(x) * mask


class WithNone(Block):
    """Gives (x, None)."""

    def forward(self, x: Any) -> Any:
        return super().forward(x[0] if isinstance(x, tuple) else x), None


class First(Block):
    """Takes a tuple, of which it uses the first value."""

    def forward(self, x: Any) -> Any:
        return super().forward(x[0])


class Beside(Block):
    """Gives a second value, from weights of its own, that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.aside(x)


class Spare(Block):
    """Has weights that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class Noise(nn.Module):
    """y = w * x * mask with a random mask, of degree one in w: so the sum of w * dL/dw is L for a loss L = sum(y)."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x if self.late else self.w * x * torch.rand_like(x)


class Fused(torch.autograd.Function):
    """x * w. Backward adds to ``w.main_grad`` itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.w = w
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.w.main_grad += (grad * x).sum(0)
        return grad * ctx.w.detach(), torch.zeros_like(ctx.w)


class InPlace(torch.autograd.Function):
    """x * w. Backward writes the gradient of x into the gradient that it gets, as kernels of normalization do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        found = (grad * x).sum(0)
        return grad.mul_(w), found


class Custom(nn.Module):
    """Linear, tanh, and a custom function, whose output leaves the layer as it is."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(WIDTH, WIDTH)
        self.w = nn.Parameter(torch.rand(WIDTH))
        self.w.main_grad = torch.zeros(WIDTH, dtype=torch.double)  # type: ignore[attr-defined]  # as Megatron-LM's

    def forward(self, x: Tensor) -> Any:
        return self.function.apply(torch.tanh(self.linear(x)), self.w)


class HookOnInput(Block):
    """Registers a hook on its input, which multiplies the gradient by 3."""

    def forward(self, x: Tensor) -> Any:
        if x.requires_grad:
            hook: Any = x.register_hook
            hook(lambda grad: grad * 3)
        return super().forward(x)


class WritesInput(Block):
    """Works on its input in place."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.mul_(0.5))


class Boom(Block):
    """Raises as its third forward pass begins, or in each backward pass.

    A checkpoint of PyTorch may leave a recomputation before its end, so an error there would not come.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Any:
        if self.where == "forward" and self.calls == 2:
            self.calls += 1
            raise ArithmeticError("boom")
        y = super().forward(x)
        if self.where == "backward" and y.requires_grad:
            y.register_hook(self._raise)
        return y

    def _raise(self, _: Tensor) -> None:
        raise ArithmeticError("boom")


class _Kept(torch.autograd.Function):
    """The identity. Saves a tensor, whose life ends with the graph, and tells its owner of backward passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Probe) -> Tensor:
        owner.live += 1
        owner.peak = max(owner.peak, owner.live)
        # An attribute of ctx would stay alive under checkpoints that are not reentrant.
        kept = torch.empty(1)
        weakref.finalize(kept, owner.freed)
        ctx.save_for_backward(kept)
        ctx.owner = owner
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _ = ctx.saved_tensors
        ctx.owner.seen.append(ctx.owner.place)
        return grad, None


class Probe(Block):
    """Counts activations that are alive, and lists backward passes with those of other probes."""

    live = peak = place = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def freed(self) -> None:
        """An activation has ended."""
        self.live -= 1

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return _Kept.apply(y, self) if torch.is_grad_enabled() else y  # type: ignore[no-untyped-call, unused-ignore]


class Typed(Block):
    """Notes the type that a matrix product has: that of autocast."""

    dtype = ""

    def forward(self, x: Tensor) -> Any:
        self.dtype = str((x.float() @ torch.eye(WIDTH)).dtype)
        return super().forward(x)


class _Sum(torch.autograd.Function):
    """The sum over a group, forward or backward; the other way the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, backward: bool) -> Tensor:
        ctx.group, ctx.backward = group, backward
        return x.view_as(x) if backward else _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _summed(grad, ctx.group) if ctx.backward else grad, None, None


def _summed(x: Tensor, group: Any) -> Tensor:
    total = x.detach().clone()
    torch.distributed.all_reduce(total, group=group)
    return total


class Sharded(nn.Module):
    """Two matrices with tanh between them. Each process of a group has columns of the first and rows of the second.

    These are the layers of Megatron-LM (https://arxiv.org/abs/1909.08053, section 3): one sum over the group in
    forward, one in backward.
    """

    setup: Setup | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 2)

    @property
    def group(self) -> Any:
        """The processes that share the layer; None in one process."""
        return self.setup and mesh_of(self.setup.shards, self.setup.n)["copies"].get_group()

    def shard(self, setup: Setup) -> None:
        """Keep the part of this process; parameters stay the same objects."""
        self.setup = setup
        place = torch.distributed.get_rank(self.group)
        self.up.data = self.up.data.chunk(setup.shards, 1)[place].clone()
        self.down.data = self.down.data.chunk(setup.shards, 0)[place].clone()

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The gradient of the whole matrix from those of all processes."""
        if self.group is None:
            return part
        parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size(self.group))]
        torch.distributed.all_gather(parts, part, group=self.group)
        return torch.cat(parts, 1 if name == "up" else 0)

    def forward(self, x: Tensor) -> Any:
        if self.group is None:
            return torch.tanh(x @ self.up) @ self.down
        part: Tensor = _Sum.apply(x, self.group, True)  # type: ignore[no-untyped-call, unused-ignore]
        return _Sum.apply(torch.tanh(part @ self.up) @ self.down, self.group, False)  # type: ignore[no-untyped-call, unused-ignore]
