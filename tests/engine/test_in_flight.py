"""How many activations and gradients a step holds at once: as many as its schedule says."""

from __future__ import annotations

import copy
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench.measure.memory import LiveBytes
from gpipe_bench.schedules import SCHEDULES, check, named_schedule, with_recomputation
from tests.engine.steps import DOUBLE, SPLIT, mean_loss, samples, scheduled, targets
from tests.engine.support import (
    assert_same,
    ended,
    on_cpu,
    train_step,
)

M, N = 8, 4
pytestmark = pytest.mark.usefixtures("no_gc")


class Held(torch.autograd.Function):
    """A node that holds a thing for as long as it lives, as a node holds what it has saved."""

    @staticmethod
    def forward(ctx, x, thing):
        ctx.thing = thing
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Things:
    """Counts what is alive on each device, and on all of them (-1), and how much has been at once."""

    def __init__(self) -> None:
        self.alive, self.most = Counter(), Counter()

    def thing(self, device: int) -> object:
        for place in (device, -1):
            self.alive[place] += 1
            self.most[place] = max(self.most[place], self.alive[place])
        thing = Thing()
        weakref.finalize(thing, self.gone, device)
        return thing

    def gone(self, device: int) -> None:
        self.alive[device] -= 1
        self.alive[-1] -= 1


class Thing:
    pass


class Holds(nn.Module):
    """Holds a thing where a layer with weights reads it: until W, if the backward pass is cut."""

    def __init__(self, things: Things, device: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.things, self.device = things, device

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.other(Held.apply(x, self.things.thing(self.device)) if torch.is_grad_enabled() else x)


def in_flight(name: str, *, recomputed: int = 0) -> list[int]:
    """What the schedule says: for each device, micro-batches whose activations it holds at once."""
    schedule = named_schedule(name, M, N, N // 2 if name in DOUBLE else N)
    if not recomputed:
        return list(check(schedule).in_flight)
    peaks = []
    for row in with_recomputation(schedule, recomputed).devices:
        held = peak = 0
        for action in row:
            first = "R" if action.i < recomputed else "F"
            held += (action.kind == first) - (action.kind in "BW")
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def most_alive(name: str, **options) -> list[int]:
    things = Things()
    placement = named_schedule(name, M, N, N // 2 if name in DOUBLE else N).placement
    layers = nn.Sequential(*(Holds(things, placement[j]) for j in range(N))).double()
    pipe = scheduled(layers, [1] * N, name, chunks=M, **options)
    for _ in range(2):
        things.most.clear()
        pipe.step(samples(M, 3, requires_grad=False), targets(M), mean_loss)
        ended()
        assert set(things.alive.values()) == {0}
    return [things.most[device] for device in (*range(max(placement) + 1), -1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_device_holds_the_activations_that_its_schedule_says(schedule):
    assert most_alive(schedule, checkpoint="never", workers="never")[:-1] == in_flight(schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_threads_it_holds_no_more(schedule):
    for most, said in zip(most_alive(schedule, checkpoint="never")[:-1], in_flight(schedule), strict=True):
        assert most <= said


def test_1f1b_holds_as_many_microbatches_as_partitions_follow():
    assert in_flight("gpipe") == [M] * N
    assert most_alive("1f1b", checkpoint="never", workers="never")[:-1] == [N - j for j in range(N)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_checkpoints_hold_only_what_is_recomputed(schedule, checkpoint):
    recomputed = {"always": M, "except_last": M - 1}[checkpoint]
    *found, together = most_alive(schedule, checkpoint=checkpoint, workers="never")
    assert found == in_flight(schedule, recomputed=recomputed)
    if schedule not in (*SPLIT, "dualpipe_v") and checkpoint == "always":
        assert found == [1] * len(found)
        assert together == 1, "one thread recomputes for one partition at a time"


DEPTH = 99


class Deep(nn.Module):
    """(B, 64) -> (B, 64), by 99 activations that its backward pass needs, two of them for the gradients of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.first
        for _ in range(DEPTH - 1):
            x = torch.tanh(x)
        return x * self.last


def activation_bytes(schedule: str) -> list[int]:
    """The most that each partition holds in a step, without its weights and their gradients."""
    pipe = scheduled(nn.Sequential(*(Deep() for _ in range(N))), [1] * N, schedule, chunks=M, checkpoint="never",
                     workers="never")  # fmt: skip
    x, target = torch.ones(4 * M, 64), torch.ones(4 * M)
    pipe.step(x, target, mean_loss)
    live = LiveBytes(pipe)
    with live, pipe.observe(live):
        pipe.step(x, target, mean_loss)
    return [peak - 2 * 2 * 4 * 64 for peak in live.peak_bytes]


def test_1f1b_holds_its_share_of_the_bytes_of_gpipe():
    for j, (ours, all_of_them) in enumerate(zip(activation_bytes("1f1b"), activation_bytes("gpipe"), strict=True)):
        assert ours <= (N - j) / M * all_of_them * 1.05


def test_zb_h1_holds_what_1f1b_does_and_what_w_waits_for():
    """On partition j another j micro-batches wait for W (Zero Bubble, section 2.1), and the one that is in I will.

    Each of them holds two inputs and two gradients.
    """
    one = 4 * 4 * 64
    for j, (ours, least) in enumerate(zip(activation_bytes("zb_h1"), activation_bytes("1f1b"), strict=True)):
        assert ours <= least + (j + 1) * 4 * one


# --- the gradient of a task's sole output belongs to the task -------------------------------------------------------

WIDTH, LARGE = 64, 256


class Between(nn.Module):
    """Looks at the gradients of its linear layer: that of the output, and later that of what it computes it from."""

    def __init__(self, gone):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gone = gone

    def forward(self, x):
        came = []
        inner = torch.tanh(x)
        outer = self.linear(inner)
        if outer.requires_grad:
            outer.register_hook(lambda grad: came.append(weakref.ref(grad.untyped_storage())))
            inner.register_hook(lambda _: self.gone.append(came.pop()() is None))
        return outer


@pytest.mark.parametrize("workers", ["never", "always"])
@pytest.mark.parametrize("rows", [1, LARGE])
def test_nobody_else_holds_the_gradient(rows, workers):
    gone = []
    layers = [nn.Linear(WIDTH, WIDTH), Between(gone), Between(gone), nn.Linear(WIDTH, 1)]
    pipe = on_cpu(nn.Sequential(*layers), [1, 1, 2], chunks=2, checkpoint="never", schedule="gpipe", workers=workers)
    for _ in range(3):
        gone.clear()
        pipe(torch.randn(2 * rows, WIDTH)).square().mean().backward()
        assert gone == [True] * 4  # of two layers in two micro-batches


class Looked(nn.Module):
    """Keeps the gradient of its output, as a user who looks at it does, in two ways."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.outputs, self.grads = [], []

    def forward(self, x):
        output = self.linear(x)
        output.retain_grad()
        output.register_hook(self.grads.append)
        self.outputs.append(output)
        return output


@pytest.mark.parametrize("workers", ["never", "always"])
def test_hooks_of_the_output_see_its_gradient(workers):
    model = nn.Sequential(Looked(), nn.Linear(WIDTH, WIDTH)).double()
    plain = copy.deepcopy(model)
    x = torch.randn(LARGE, WIDTH).double()
    pipe = on_cpu(model, [1, 1], chunks=1, checkpoint="never", schedule="gpipe", workers=workers)
    for _ in range(2):
        assert_same(train_step(pipe, x), train_step(plain, x))
        torch.testing.assert_close(model[0].grads[-1], plain[0].grads[-1])
        torch.testing.assert_close(model[0].outputs[-1].grad, plain[0].outputs[-1].grad)
