"""What stays alive, and for how long. The garbage collector is off: what is freed must be freed by itself.

A tensor that hangs on a reference cycle through the autograd graph would never be freed: the collector cannot see it.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe_bench import Components, is_recomputing
from tests.engine.support import FACTORIAL, MODES, Mix, Watch, crossing_model, label, on_cpu, score

pytestmark = pytest.mark.usefixtures("no_gc")

X = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)
every_combination = pytest.mark.parametrize("components", FACTORIAL, ids=label)


def live_tensors() -> int:
    # not isinstance: it asks objects for __class__, and some lazy modules warn of that
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def crossing_pipe(**options):
    return on_cpu(crossing_model(), [2, 2, 3], chunks=3, **options)


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", MODES)
@every_combination
def test_a_step_leaves_no_tensor_behind(components, checkpoint, transfer):
    pipe = crossing_pipe(components=components, checkpoint=checkpoint, transfer=transfer)
    counts = []
    for _ in range(4):
        score(pipe(X)).backward()
        pipe.zero_grad()
        counts.append(live_tensors())
    # the first step makes what is kept, such as phonies
    assert counts[1:] == counts[1:2] * 3


@pytest.mark.parametrize("checkpoint", MODES)
@every_combination
def test_a_forward_pass_without_a_backward_pass_leaves_no_tensor_behind(components, checkpoint):
    pipe = crossing_pipe(components=components, checkpoint=checkpoint)
    counts = []
    for _ in range(4):
        pipe(X)
        counts.append(live_tensors())
    assert counts[1:] == counts[1:2] * 3


@pytest.mark.parametrize("checkpoint", MODES)
def test_observing_leaves_no_tensor_behind(checkpoint):
    pipe = crossing_pipe(checkpoint=checkpoint)
    counts = []
    for _ in range(4):
        with pipe.observe(Watch()):
            score(pipe(X)).backward()
        pipe.zero_grad()
        counts.append(live_tensors())
    assert counts[1:] == counts[1:2] * 3


def test_deferred_batch_norm_leaves_no_tensor_behind():
    pipe = on_cpu(nn.Sequential(nn.BatchNorm1d(3)).double(), [1], chunks=3, deferred_batch_norm=True)
    counts = []
    for _ in range(4):
        pipe(X)
        counts.append(live_tensors())
    assert counts[1:] == counts[1:2] * 3


class Fail(nn.Module):
    """Raises in the first pass, or in the recomputation."""

    def __init__(self, *, recomputing: bool) -> None:
        super().__init__()
        self.recomputing = recomputing

    def forward(self, x):
        if is_recomputing() == self.recomputing:
            raise ArithmeticError
        return x * 2


@pytest.mark.parametrize("recomputing", [False, True])
@every_combination
def test_a_failure_leaves_no_tensor_behind(components, recomputing):
    layers = nn.Sequential(Mix(), Fail(recomputing=recomputing)).double()
    pipe = on_cpu(layers, [1, 1], chunks=3, components=components, checkpoint="always")
    counts = []
    for _ in range(4):
        with pytest.raises(ArithmeticError):
            score(pipe(X)).backward()
        pipe.zero_grad()
        # the exception itself keeps its frames, in cycles that the collector does see
        gc.collect()
        counts.append(live_tensors())
    assert counts[1:] == counts[1:2] * 3


def test_a_dropped_pipeline_is_freed_with_its_parameters():
    pipe = crossing_pipe()
    score(pipe(X)).backward()
    parameter = weakref.ref(next(pipe.parameters()))
    del pipe
    gc.collect()
    assert parameter() is None


# --- what a checkpoint keeps -------------------------------------------------------------------------------------


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
    loss = score(pipe(X))
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
        score(pipe(X)).backward()
    assert max(found) == most


def test_the_input_is_not_kept_after_a_step():
    pipe = crossing_pipe(checkpoint="always")
    x = X.clone()
    kept = StorageWeakRef(x.untyped_storage())
    score(pipe(x)).backward()
    del x
    assert kept.expired()


def test_a_worker_does_not_keep_the_last_result():
    pipe = crossing_pipe()
    with torch.no_grad():
        output = pipe(X)
    kept = StorageWeakRef(output.untyped_storage())
    del output
    assert kept.expired()


# --- beside a backward pass that waits ---------------------------------------------------------------------------


class Plus(nn.Module):
    """Nothing of its input or output is needed backward; keeps weak references on both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.inputs: list[StorageWeakRef] = []
        self.outputs: list[StorageWeakRef] = []

    def forward(self, x):
        y = x + self.weight
        self.inputs.append(StorageWeakRef(x.untyped_storage()))
        self.outputs.append(StorageWeakRef(y.untyped_storage()))
        return y


both_backwards = pytest.mark.parametrize("backward", ["autograd", "scheduled"])


@both_backwards
@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_outputs_of_microbatches_are_freed_once_they_are_put_together(checkpoint, workers, backward):
    layers = [Plus(), Plus()]
    pipe = on_cpu(nn.Sequential(*layers), [1, 1], chunks=3, checkpoint=checkpoint, workers=workers, backward=backward)
    output = pipe(X)
    assert all(kept.expired() for kept in layers[1].outputs)
    output.sum().backward()


@both_backwards
@pytest.mark.parametrize("workers", ["always", "never"])
def test_without_checkpoint_a_task_keeps_what_its_layers_need_and_not_its_inputs(workers, backward):
    layers = [Plus(), Plus(), Plus()]
    pipe = on_cpu(nn.Sequential(*layers), [1, 1, 1], chunks=3, checkpoint="never", workers=workers, backward=backward)
    output = pipe(X.clone())
    assert [kept.expired() for layer in layers[1:] for kept in layer.inputs] == [True] * 6
    output.sum().backward()


@both_backwards
def test_the_first_batch_keeps_one_copy_more_than_the_others(backward):
    """Its first task works on a copy, which shows whether the first layers write to the caller's batch."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    pipe = on_cpu(layers, [1, 1], chunks=3, checkpoint="never", backward=backward, workers="never")
    found = []
    storages = set()

    def pack(tensor):
        storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    for _ in range(3):
        storages.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = pipe(X)
        # weights, the batch, and what passes from one partition to the next
        found.append(len(storages - {p.untyped_storage().data_ptr() for p in pipe.parameters()}))
        output.sum().backward()
    assert found == [5, 4, 4]


@both_backwards
@pytest.mark.parametrize("checkpoint", MODES)
def test_no_state_of_a_generator_is_kept(checkpoint, backward):
    pipe = on_cpu(nn.Sequential(Mix(), Mix()).double(), [1, 1], chunks=3, checkpoint=checkpoint, backward=backward)
    state = torch.default_generator.get_state()
    before = sum(issubclass(type(thing), Tensor) and thing.shape == state.shape for thing in gc.get_objects())
    outputs = [pipe(X) for _ in range(2)]
    after = sum(issubclass(type(thing), Tensor) and thing.shape == state.shape for thing in gc.get_objects())
    assert after == before
    del outputs
