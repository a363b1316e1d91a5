"""What stays alive, and for how long. The garbage collector is off: what is freed must be freed by itself.

A tensor that hangs on a reference cycle through the autograd graph would never be freed: the collector cannot see it.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe_bench import Components, is_recomputing
from tests.cover import cover
from tests.engine.steps import WAYS, mean_loss, samples, scheduled, step, targets
from tests.engine.support import (
    MODES,
    SOME,
    Mix,
    Watch,
    crossing_model,
    ended,
    label,
    on_cpu,
    score,
)

M, N = 8, 4
pytestmark = pytest.mark.usefixtures("no_gc")

every_mode = pytest.mark.parametrize("checkpoint", MODES)
both_workers = pytest.mark.parametrize("workers", ["always", "never"])
both_calls = pytest.mark.parametrize("schedule", [None, "gpipe"])


def live(shape: torch.Size | None = None) -> int:
    """How many tensors there are, of this shape."""
    ended()
    # not isinstance: it asks objects for __class__, and some lazy modules warn of that
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return sum(shape is None or tensor.shape == shape for tensor in tensors)


# --- nothing stays --------------------------------------------------------------------------------------------------


def forward_alone(pipe, called):
    with torch.set_grad_enabled(called):
        pipe(samples(7, 3))


def watched(pipe, called):
    with pipe.observe(Watch()):
        step(pipe, samples(7, 3), targets(7), called=called)


def failing(pipe, called):
    """In the recomputation, or else in the forward pass."""

    def fail(*_):
        if is_recomputing() or pipe.checkpoint == "never":
            raise ArithmeticError

    with pipe[3].register_forward_pre_hook(fail), pytest.raises(ArithmeticError):
        step(pipe, samples(7, 3), targets(7), called=called)
    # the exception itself keeps its frames, in cycles that the collector does see
    gc.collect()


ACTIONS = {
    "a step": lambda pipe, called: step(pipe, samples(7, 3), targets(7), called=called),
    "a forward pass alone": forward_alone,
    "an observed step": watched,
    "a failure": failing,
}
ALL_WAYS = product(ACTIONS, WAYS, MODES, ["direct", "host"], [Components()])
SWITCHED = product(ACTIONS, WAYS[:3:2], MODES, ["host"], SOME)


@pytest.mark.parametrize(
    ("action", "way", "checkpoint", "transfer", "components"),
    [*cover(ALL_WAYS), *cover(SWITCHED)],
    ids=label,
)
def test_no_tensor_stays_behind(action, way, checkpoint, transfer, components):
    schedule, called = way
    layers = [*crossing_model()[:6], nn.Sequential(nn.BatchNorm1d(3), Mix())]
    options = {"checkpoint": checkpoint, "transfer": transfer, "components": components, "deferred_batch_norm": True}
    pipe = scheduled(nn.Sequential(*layers).double(), [2, 2, 2, 1], schedule, chunks=2, **options)
    counts = []
    for _ in range(4):
        ACTIONS[action](pipe, called)
        pipe.zero_grad()
        counts.append(live())
    # the first step makes what is kept, such as phonies
    assert counts[1:] == counts[1:2] * 3


@pytest.mark.parametrize(
    ("way", "checkpoint", "workers", "keeps"),
    cover(product(WAYS, MODES, ["always", "never"], [True, False])),
)
def test_after_a_step_nothing_of_the_batch_is_alive_but_what_the_caller_keeps(way, checkpoint, workers, keeps):
    """The loss, and maybe the output."""
    schedule, called = way
    held: list[StorageWeakRef] = []
    layers = nn.Sequential(*(Mix() for _ in range(4))).double()
    for layer in layers:
        layer.register_forward_hook(
            lambda _layer, given, output: held.extend(
                StorageWeakRef(each.untyped_storage()) for each in (*given, output)
            )
        )
    pipe = scheduled(layers, [1] * 4, schedule, chunks=3, checkpoint=checkpoint, workers=workers, transfer="host")
    for _ in range(2):
        x, target = samples(7, 3, requires_grad=False).clone(), targets(7).clone()
        held += [StorageWeakRef(value.untyped_storage()) for value in (x, target)]
        if called:
            output = pipe(x)
            loss = mean_loss(output, target)
            loss.backward()
        else:
            loss, output = pipe.step(x, target, mean_loss, return_output=True)
        loss, output = loss.detach(), output.detach() if keeps else None
        del x, target
        ended()
        assert held
        assert all(each.expired() for each in held)


@both_calls
@both_workers
@every_mode
def test_a_loss_that_the_caller_keeps_holds_nothing_of_a_batch_whose_backward_pass_is_over(
    checkpoint, workers, schedule
):
    """As in a training loop, which has the loss of a step until the next one."""
    layers = nn.Sequential(Plus(), Plus(), Plus())
    pipe = on_cpu(layers, [1, 1, 1], chunks=3, checkpoint=checkpoint, workers=workers, schedule=schedule)
    loss = score(pipe(samples(6, 3, requires_grad=False).clone()))
    loss.backward()
    ended()
    assert [kept for layer in layers for kept in (*layer.inputs, *layer.outputs) if not kept.expired()] == []


@both_workers
@every_mode
@pytest.mark.parametrize("way", [("gpipe", True), ("gpipe", False), ("zb_h1", False)])
def test_an_exception_that_the_caller_keeps_holds_what_its_task_had_and_nothing_else(way, checkpoint, workers):
    """As in a handler that tries again with less, where memory ran out."""
    schedule, called = way
    layers = nn.Sequential(Plus(), Plus(), Plus(fails_at=2))
    pipe = scheduled(layers, [1, 1, 1], schedule, chunks=4, checkpoint=checkpoint, workers=workers)
    run = partial(pipe, samples(8, 3)) if called else partial(pipe.step, samples(8, 3), targets(8), mean_loss)
    with pytest.raises(MemoryError) as caught:
        run()
    ended()
    # Of the partitions before the one that failed only the value that it had taken.
    alive = [sum(not kept.expired() for kept in layer.outputs) for layer in layers[:2]]
    assert (caught.value.args, alive) == (("full",), [0, 1])


def test_a_dropped_pipeline_is_freed_with_its_parameters():
    pipe = on_cpu(crossing_model(), [2, 2, 3], chunks=3)
    score(pipe(samples(6, 3))).backward()
    parameter = weakref.ref(next(pipe.parameters()))
    del pipe
    gc.collect()
    assert parameter() is None


@both_calls
@every_mode
def test_no_state_of_a_generator_is_kept(checkpoint, schedule):
    pipe = on_cpu(nn.Sequential(Mix(), Mix()).double(), [1, 1], chunks=3, checkpoint=checkpoint, schedule=schedule)
    state = torch.default_generator.get_state()
    before = live(state.shape)
    outputs = [pipe(samples(6, 3)) for _ in range(2)]
    assert live(state.shape) == before
    del outputs


# --- between forward and backward pass ------------------------------------------------------------------------------


class Inside(nn.Module):
    """Keeps a weak reference on a tensor that only its own backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.kept: list[StorageWeakRef] = []

    def forward(self, x):
        hidden = torch.tanh(x * self.weight)
        self.kept.append(StorageWeakRef(hidden.untyped_storage()))
        return hidden * 2 + 1

    def alive(self) -> list[bool]:
        return [not kept.expired() for kept in self.kept]


@pytest.mark.parametrize(
    ("checkpoint", "alive"),
    [
        ("always", [False, False, False]),
        ("except_last", [False, False, True]),
        ("never", [True, True, True]),
    ],
)
def test_what_is_alive_between_forward_and_backward_pass(checkpoint, alive):
    layer = Inside()
    pipe = on_cpu(nn.Sequential(layer, Mix().double()), [1, 1], chunks=3, checkpoint=checkpoint)
    loss = score(pipe(samples(6, 3)))
    assert layer.alive() == alive
    loss.backward()
    assert layer.alive() == [False] * len(layer.kept)


@pytest.mark.parametrize(("fork_join", "most"), [(True, 1), (False, 3)])
def test_how_many_recomputed_microbatches_of_the_last_partition_are_alive_at_once(fork_join, most):
    """The memory that Fork and Join save."""
    layer = Inside()
    found = []

    class Watching(Watch):
        def start(self, task):
            found.append(sum(layer.alive()))
            return super().start(task)

    components = Components(fork_join=fork_join)
    pipe = on_cpu(nn.Sequential(Mix().double(), layer), [1, 1], chunks=3, checkpoint="always", components=components)
    with pipe.observe(Watching()):
        score(pipe(samples(6, 3))).backward()
    assert max(found) == most


def test_a_worker_does_not_keep_the_last_result():
    pipe = on_cpu(crossing_model(), [2, 2, 3], chunks=3)
    with torch.no_grad():
        output = pipe(samples(6, 3))
    kept = StorageWeakRef(output.untyped_storage())
    del output
    assert kept.expired()


class Plus(nn.Module):
    """Nothing of its input or output is needed backward; keeps weak references on both. May fail in a forward pass."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.inputs: list[StorageWeakRef] = []
        self.outputs: list[StorageWeakRef] = []

    def forward(self, x):
        if len(self.inputs) == self.fails_at:
            raise MemoryError("full")
        y = x + self.weight
        self.inputs.append(StorageWeakRef(x.untyped_storage()))
        self.outputs.append(StorageWeakRef(y.untyped_storage()))
        return y


@both_calls
@both_workers
@every_mode
def test_outputs_of_microbatches_are_freed_once_they_are_put_together(checkpoint, workers, schedule):
    layers = [Plus(), Plus(), Plus()]
    options = {"checkpoint": checkpoint, "workers": workers, "schedule": schedule}
    output = on_cpu(nn.Sequential(*layers), [1, 1, 1], chunks=3, **options)(samples(6, 3))
    assert all(kept.expired() for kept in layers[2].outputs)
    if checkpoint == "never":  # a task keeps what its layers need, and not its inputs
        assert [kept.expired() for layer in layers[1:] for kept in layer.inputs] == [True] * 6
    output.sum().backward()


@both_calls
def test_the_first_batch_keeps_one_copy_more_than_the_others(schedule):
    """Its first task works on a copy, which shows whether the first layers write to the caller's batch."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    pipe = on_cpu(layers, [1, 1], chunks=3, checkpoint="never", schedule=schedule, workers="never")
    found = []
    storages = set()

    def pack(tensor):
        storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    x = samples(6, 3, requires_grad=False)
    for _ in range(3):
        storages.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = pipe(x)
        # weights, the batch, and what passes from one partition to the next
        found.append(len(storages - {p.untyped_storage().data_ptr() for p in pipe.parameters()}))
        output.sum().backward()
    assert found == [5, 4, 4]


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
