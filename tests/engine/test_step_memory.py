"""What a step holds, and that nothing of it stays. The garbage collector is off: everything must be freed by itself."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe_bench.measure.memory import LiveBytes
from gpipe_bench.schedules import SCHEDULES, check, named_schedule, with_recomputation
from tests.engine.steps import ALL, DOUBLE, SPLIT, mean_loss, samples, scheduled, targets
from tests.engine.support import MODES, Mix, crossing_model

M, N = 8, 4
pytestmark = pytest.mark.usefixtures("no_gc")

every_schedule = pytest.mark.parametrize("schedule", ALL)
every_mode = pytest.mark.parametrize("checkpoint", MODES)
both_workers = pytest.mark.parametrize("workers", ["always", "never"])


# --- activations in flight -------------------------------------------------------------------------------------------


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


# --- nothing stays ---------------------------------------------------------------------------------------------------


def ended() -> None:
    """Wait for the thread of the batch, which hands its result over right before it ends."""
    for thread in threading.enumerate():
        if thread.name == "gpipe-batch":
            thread.join(timeout=30)


class Seen(Mix):
    """Keeps weak references on everything that passes."""

    def __init__(self, held: list[StorageWeakRef]) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.held += [StorageWeakRef(value.untyped_storage()) for value in (x, y)]
        return y


@every_schedule
@every_mode
@both_workers
def test_after_a_step_nothing_of_the_batch_is_alive(schedule, checkpoint, workers):
    held: list[StorageWeakRef] = []
    pipe = scheduled(
        nn.Sequential(*(Seen(held) for _ in range(4))).double(), [1] * 4, schedule,
        chunks=3, checkpoint=checkpoint, workers=workers, transfer="host",
    )  # fmt: skip
    for _ in range(2):
        x, target = samples(7, 3, requires_grad=False).clone(), targets(7).clone()
        held += [StorageWeakRef(value.untyped_storage()) for value in (x, target)]
        loss = pipe.step(x, target, mean_loss)
        del x, target
        ended()
        assert all(each.expired() for each in held)
        assert loss.dim() == 0


@every_schedule
@both_workers
def test_a_kept_output_keeps_nothing_else(schedule, workers):
    held: list[StorageWeakRef] = []
    pipe = scheduled(
        nn.Sequential(*(Seen(held) for _ in range(4))).double(), [1] * 4, schedule, chunks=3, workers=workers
    )
    _, output = pipe.step(samples(7, 3).detach(), targets(7), mean_loss, return_output=True)
    ended()
    assert output.shape == (7, 3)
    assert all(each.expired() for each in held)


@every_mode
def test_outputs_of_microbatches_do_not_pile_up(checkpoint):
    """In 1F1B each of them goes backward before the next one comes; a recomputation finds that of its first pass."""
    outputs: list[StorageWeakRef] = []
    alive: list[int] = []

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(not each.expired() for each in outputs))
            y = self.linear(x)
            outputs.append(StorageWeakRef(y.untyped_storage()))
            return y

    layers = nn.Sequential(*(Mix() for _ in range(N - 1)), Last()).double()
    pipe = scheduled(layers, [1] * N, "1f1b", chunks=M, checkpoint=checkpoint, workers="never")
    pipe.step(samples(M, 3), targets(M), mean_loss)
    assert alive == {"always": [0, 1] * M, "except_last": [0, 1] * (M - 1) + [0], "never": [0] * M}[checkpoint]


@every_schedule
@every_mode
def test_steps_leave_no_tensor_behind(schedule, checkpoint):
    pipe = scheduled(crossing_model(), [2, 2, 2, 1], schedule, chunks=3, checkpoint=checkpoint, transfer="host")
    counts = []
    for _ in range(4):
        pipe.step(samples(7, 3), targets(7), mean_loss)
        pipe.zero_grad()
        ended()
        counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
    # the first step makes what is kept, such as phonies
    assert counts[1:] == counts[1:2] * 3


class BoomError(Exception):
    """Raised by layers here."""


class Fails(nn.Module):
    """Raises in the forward or backward pass of micro-batch 1, or when its input is recomputed."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase

    def fail(self, *_: object) -> None:
        raise BoomError

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        if int(x.detach()[0, 0]) == 1:
            if self.phase == "forward":
                self.fail()
            if self.phase == "backward" and y.requires_grad:
                y.register_hook(self.fail)
        return y


@every_schedule
@every_mode
@both_workers
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_failed_is_free(schedule, checkpoint, workers, phase):
    held: list[weakref.ref[Tensor]] = []
    layers = nn.Sequential(nn.Linear(1, 1), Fails(phase), nn.Linear(1, 1), nn.Linear(1, 1))
    layers[0].weight.data.fill_(1), layers[0].bias.data.fill_(0)
    for layer in layers:
        layer.register_forward_pre_hook(lambda _layer, given: held.append(weakref.ref(given[0])))
        layer.register_forward_hook(lambda _layer, _given, output: held.append(weakref.ref(output)))
    pipe = scheduled(layers, [1] * 4, schedule, chunks=4, checkpoint=checkpoint, workers=workers)
    with pytest.raises(BoomError):
        pipe.step(torch.arange(4.0).unsqueeze(1), torch.ones(4), mean_loss)
    ended()
    # what autograd had yet to run stays in its queue until the next backward pass
    torch.ones(1, requires_grad=True).sum().backward()
    assert held
    assert [each for each in held if each() is not None] == []
