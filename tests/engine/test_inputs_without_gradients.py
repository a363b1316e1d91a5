"""Inputs that need no gradient, as tokens: none is computed for them, and layers get them as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engine.support import FACTORIAL, MODES, Watch, grid, label, on_cpu

M = 4
TOKENS = torch.arange(2 * M).reshape(2 * M, 1) % 5
everywhere = pytest.mark.parametrize(
    ("transfer", "workers"), [(way, who) for way in ("direct", "host") for who in ("always", "never")]
)


class Box:
    """What no pytree knows."""

    def __init__(self, value):
        self.value = value


class Put(nn.Module):
    def forward(self, x):
        return Box(x)


class Take(nn.Module):
    def forward(self, box):
        return box.value


class Beside(nn.Module):
    """Gives numbers that need no gradient beside what comes."""

    def forward(self, x):
        return {"x": x, "length": x.detach().sum(), "count": len(x)}


class Only(nn.Module):
    def forward(self, values):
        return values["x"] * values["count"]


class Shared(nn.Module):
    """Gives a tensor, a view of it, and keeps it aside."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        self.kept = self.layer(x)
        return self.kept, self.kept[..., :2]


class Writes(nn.Module):
    """Writes to one, and then reads all."""

    def __init__(self, shared):
        super().__init__()
        self.shared = [shared]

    def forward(self, values):
        values[1].mul_(3)
        (shared,) = self.shared
        return values[0] * 2 + shared.kept**2 + values[1].sum(-1, keepdim=True)


class Begins(Watch):
    """Keeps ends, too."""

    def __init__(self):
        super().__init__()
        self.log = []

    def start(self, task):
        seen = super().start(task)
        self.log.append(f"{seen.name} begins")
        return seen

    def finish(self, token, nbytes):
        super().finish(token, nbytes)
        self.log.append(f"{token.name} ends")


def layers(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 3), *between, nn.Linear(3, 3), nn.Linear(3, 3)).double()


def last_seen(log, name):
    return max(place for place, entry in enumerate(log) if entry == name)


@everywhere
def test_a_task_without_checkpoint_ends_before_the_next_recomputation_begins(transfer, workers):
    pipe = on_cpu(layers(), [2, 1], chunks=M, checkpoint="except_last", transfer=transfer, workers=workers)
    with pipe.observe(watch := Begins()):
        pipe(TOKENS).sum().backward()
    names = [name for name in watch.order("RB").split() if name.endswith(",0")]
    assert names == ["B3,0", "R2,0", "B2,0", "R1,0", "B1,0", "R0,0", "B0,0"]
    assert last_seen(watch.log, "B3,0 ends") < last_seen(watch.log, "R2,0 begins")


@everywhere
@pytest.mark.parametrize("balance", [[1, 2], [3]], ids=str)
def test_without_checkpoints_tasks_end_one_after_the_other(balance, transfer, workers):
    pipe = on_cpu(layers(), balance, chunks=M, checkpoint="never", transfer=transfer, workers=workers)
    with pipe.observe(watch := Begins()):
        pipe(TOKENS).sum().backward()
    assert [name for name in watch.order("B").split() if name.endswith(",0")] == grid("B", reversed(range(M)), [0])
    for i in range(1, M):
        assert last_seen(watch.log, f"B{i},0 ends") < last_seen(watch.log, f"B{i - 1},0 begins")


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("components", FACTORIAL, ids=label)
@pytest.mark.parametrize("between", [(), (Put(), Take()), (Beside(), Only())], ids=["tensor", "object", "dict"])
def test_gradients_are_those_of_the_plain_module(between, components, checkpoint):
    plain = layers(*between)
    pipe = on_cpu(layers(*between), [len(plain) - 1, 1], chunks=M, checkpoint=checkpoint, components=components,
                  workers="always", transfer="host")  # fmt: skip
    torch.cat([plain(part) for part in TOKENS.chunk(M)]).square().sum().backward()
    pipe(TOKENS).square().sum().backward()
    for own, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad)


@everywhere
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "numbers"])
def test_what_layers_hand_to_each_other_is_left_alone(tokens, checkpoint, transfer, workers):
    """Between layers of a partition, autograd knows what shares memory, and layers know which tensor is which."""

    def made():
        torch.manual_seed(0)
        shared = Shared(nn.Embedding(5, 3) if tokens else nn.Linear(1, 3))
        return nn.Sequential(shared, Writes(shared), nn.Linear(3, 3)).double()

    batch = TOKENS if tokens else TOKENS.double()
    plain, whole = made(), made()
    pipe = on_cpu(whole, [2, 1], chunks=M, checkpoint=checkpoint, transfer=transfer, workers=workers)
    torch.cat([plain(part) for part in batch.chunk(M)]).square().sum().backward()
    pipe(batch).square().sum().backward()
    for own, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("components", FACTORIAL, ids=label)
def test_no_gradient_is_computed_for_a_batch_that_needs_none(components, checkpoint):
    asked = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            asked.append(ctx.needs_input_grad[0])
            (x,) = ctx.saved_tensors
            return None, (x * grad).sum()

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return Scale.apply(x, self.weight)

    pipe = on_cpu(nn.Sequential(Scaled(), nn.Linear(3, 3)), [1, 1], chunks=M, checkpoint=checkpoint,
                  components=components, transfer="host")  # fmt: skip
    pipe(torch.ones(2 * M, 3)).sum().backward()
    assert asked == M * [False]
