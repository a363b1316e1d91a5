"""Checkpointing: what runs twice, what layers are told, and what autograd may still be asked for."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import Components, is_checkpointing, is_recomputing
from tests.engine.support import (
    MODES,
    WIDTH,
    Affine,
    Flags,
    InPlace,
    Mix,
    assert_same,
    on_cpu,
    train_step,
)

PLAIN, FIRST, AGAIN = (False, False), (True, False), (False, True)


def ones(size: int) -> Tensor:
    return torch.ones(size, WIDTH)


def flags_of_a_step(size=4, chunks=4, *, train=True, **options) -> list[tuple[bool, bool]]:
    layer = Flags()
    pipe = on_cpu(nn.Sequential(layer), [1], chunks=chunks, **options).train(train)
    pipe(ones(size)).sum().backward()
    return layer.seen


@pytest.mark.parametrize(
    ("checkpoint", "forward", "backward"),
    [
        ("always", [FIRST] * 4, [AGAIN] * 4),
        ("except_last", [FIRST] * 3 + [PLAIN], [AGAIN] * 3),
        ("never", [PLAIN] * 4, []),
    ],
)
@pytest.mark.parametrize("early_recompute", [True, False])
def test_what_layers_are_told_and_how_often_they_run(checkpoint, forward, backward, early_recompute):
    components = Components(early_recompute=early_recompute)
    assert flags_of_a_step(checkpoint=checkpoint, components=components) == forward + backward


@pytest.mark.parametrize(("size", "chunks", "microbatches"), [(2, 8, 2), (5, 4, 3), (1, 4, 1)])
def test_the_last_microbatch_is_the_last_actual_one(size, chunks, microbatches):
    seen = flags_of_a_step(size, chunks, checkpoint="except_last")
    assert seen == [FIRST] * (microbatches - 1) + [PLAIN] + [AGAIN] * (microbatches - 1)


def test_evaluation_checkpoints_nothing():
    assert flags_of_a_step(checkpoint="always", train=False) == [PLAIN] * 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_checkpointed(mode):
    layer = Flags()
    pipe = on_cpu(nn.Sequential(layer), [1], chunks=2, checkpoint="always")
    with mode():
        pipe(ones(2))
    assert layer.seen == [PLAIN] * 2


def test_mode_and_chunks_may_change_between_batches():
    layer = Flags()
    pipe = on_cpu(nn.Sequential(layer), [1], chunks=4, checkpoint="always")
    pipe.checkpoint, pipe.chunks = "never", 2
    pipe(ones(4))
    assert layer.seen == [PLAIN] * 2


def test_outside_a_pipeline_both_flags_are_off():
    assert (is_checkpointing(), is_recomputing()) == PLAIN


def test_flags_belong_to_a_thread():
    """While one partition runs its first pass, the calling thread and other workers are told nothing of it."""
    inside, asked = threading.Event(), threading.Event()
    elsewhere = []

    class Hold(nn.Module):
        def forward(self, x):
            inside.set()
            assert asked.wait(timeout=30)
            return x * torch.ones(1, requires_grad=True)

    def ask():
        inside.wait(timeout=30)
        elsewhere.append((is_checkpointing(), is_recomputing()))
        asked.set()

    thread = threading.Thread(target=ask)
    thread.start()
    on_cpu(nn.Sequential(Hold(), Mix()), [1, 1], chunks=2, checkpoint="always")(ones(2))
    thread.join()
    assert elsewhere == [PLAIN]


def test_flags_are_back_after_an_exception():
    class Fail(nn.Module):
        def forward(self, x):
            raise ValueError("as it must")

    pipe = on_cpu(nn.Sequential(Fail(), Flags()), [2], checkpoint="always")
    with pytest.raises(ValueError, match="as it must"):
        pipe(ones(1).requires_grad_())
    assert (is_checkpointing(), is_recomputing()) == PLAIN


def test_a_frozen_partition_without_gradients_to_pass_on_is_not_checkpointed():
    frozen, trained = Flags().requires_grad_(requires_grad=False), Flags()
    pipe = on_cpu(nn.Sequential(frozen, trained), [1, 1], chunks=2, checkpoint="always")
    pipe(ones(2)).sum().backward()
    assert frozen.seen == [PLAIN] * 2
    assert trained.seen == [FIRST] * 2 + [AGAIN] * 2


def test_a_frozen_partition_that_passes_gradients_on_is_checkpointed():
    trained, frozen = Flags(), Flags().requires_grad_(requires_grad=False)
    pipe = on_cpu(nn.Sequential(trained, frozen), [1, 1], chunks=2, checkpoint="always")
    pipe(ones(2)).sum().backward()
    assert frozen.seen == [FIRST] * 2 + [AGAIN] * 2
    assert trained.weight.grad == 2 * WIDTH


@pytest.mark.parametrize("fork_join", [True, False])
@pytest.mark.parametrize("checkpoint", MODES)
def test_parameters_get_gradients_when_no_input_needs_one(checkpoint, fork_join):
    pipe = on_cpu(
        nn.Sequential(nn.Embedding(5, WIDTH), Mix()), [1, 1],
        chunks=2, checkpoint=checkpoint, components=Components(fork_join=fork_join),
    )  # fmt: skip
    pipe(torch.arange(4)).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in pipe.parameters())


@pytest.mark.parametrize("fork_join", [True, False])
def test_an_input_that_needs_no_gradient_gets_none_computed(fork_join):
    asked = []

    class Ask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            asked.append(x.requires_grad)
            return x * self.weight

    components = Components(fork_join=fork_join)
    pipe = on_cpu(nn.Sequential(Ask()), [1], chunks=3, checkpoint="always", components=components)
    pipe(ones(3)).sum().backward()
    assert asked == [False] * 6


@pytest.mark.parametrize("fork_join", [True, False])
@pytest.mark.parametrize("transfer", ["direct", "host"])
def test_what_needs_no_gradient_before_a_boundary_needs_none_behind_it(transfer, fork_join):
    """Unless it was computed under a checkpoint, whose first pass cannot know."""
    seen = set()

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Mix()

        def forward(self, x):
            return self.mix(x), x.detach()

    class Ask(nn.Module):
        def forward(self, values):
            if torch.is_grad_enabled():
                seen.add(tuple(value.requires_grad for value in values))
            return values[0] * values[1]

    components = Components(fork_join=fork_join)
    pipe = on_cpu(
        nn.Sequential(Pair(), Ask()), [1, 1], chunks=3, checkpoint="never", transfer=transfer, components=components
    )
    pipe(ones(6)).sum().backward()
    assert seen == {(True, False)}


def test_values_that_are_no_tensors_pass_between_layers():
    class Note(nn.Module):
        def forward(self, x):
            return x * 2, {"factor": 3}, None, "text"

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Mix()

        def forward(self, values):
            x, note, nothing, text = values
            assert (nothing, text) == (None, "text")
            return self.mix(x) * note["factor"]

    plain = nn.Sequential(Mix(), Note(), Read())
    for checkpoint in MODES:
        pipe = on_cpu(copy.deepcopy(plain), [1, 1, 1], chunks=2, checkpoint=checkpoint, transfer="host")
        assert_same(train_step(pipe, ones(4)), train_step(plain, ones(4)))


# --- in-place layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_partition_may_begin_with_an_in_place_layer(checkpoint, transfer):
    plain = nn.Sequential(Affine(), InPlace(), Affine(), nn.ReLU(inplace=True), Affine())
    pipe = on_cpu(copy.deepcopy(plain), [1, 2, 2], chunks=3, checkpoint=checkpoint, transfer=transfer)
    for _ in range(2):
        assert_same(train_step(pipe, ones(6)), train_step(plain, ones(6)))


def test_a_checkpoint_leaves_the_callers_input_alone():
    x = ones(4)
    pipe = on_cpu(nn.Sequential(InPlace(), Affine()), [2], chunks=2, checkpoint="always")
    pipe(x).sum().backward()
    torch.testing.assert_close(x, ones(4))


def test_a_layer_that_begins_to_write_to_its_input_later_is_told_to_try_again():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine = Affine()

        def forward(self, x):
            return self.affine(x.mul_(0.5) if x.max() > 10 else x * 0.5)

    plain = nn.Sequential(Affine(), Late())
    plain[0].linear.weight.data = torch.eye(WIDTH)
    pipe = on_cpu(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint="always")
    pipe(ones(2)).sum().backward()
    hot = ones(2) * 100
    with pytest.raises(RuntimeError, match=r"partition 1 must write to their input from the first batch on or never"):
        pipe(hot)
    assert_same(train_step(pipe, hot), train_step(plain, hot))


class Places(nn.Module):
    """Notes where in memory the values are that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def forward(self, x):
        self.found.append(x.untyped_storage().data_ptr())
        return x


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


PASSING = {
    "identity": (nn.Identity, True),
    "view": (lambda: nn.Flatten(0), True),
    "part": (lambda: Apply(lambda x: x[1:, ::2]), True),
    "transposed": (lambda: Apply(Tensor.t), True),
    "sums": (lambda: Apply(lambda x: x + 1), False),
    "writes": (InPlace, False),
    "negated": (lambda: Apply(torch._neg_view), None),
}


@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
@pytest.mark.parametrize("name", PASSING)
def test_after_the_first_task_inputs_are_copied_only_for_layers_that_write_to_them(name, backward):
    """The first task works on a copy, which shows whether they do."""
    make, same = PASSING[name]
    before = Places()
    plain = nn.Sequential(Affine(), make())
    pipe = on_cpu(
        nn.Sequential(nn.Sequential(copy.deepcopy(plain[0]), before), make()), [1, 1], chunks=1,
        checkpoint="always", backward=backward, workers="never",
    )  # fmt: skip
    for _ in range(2):
        before.found.clear()
        output = pipe(ones(2))
        torch.testing.assert_close(output, plain(ones(2)))
    assert same is None or (output.untyped_storage().data_ptr() == before.found[0]) is same


def clamp_data(x):
    x.data.clamp_(max=0)
    return x


def clamp_array(x):
    x.detach().numpy().clip(max=0, out=x.detach().numpy())
    return x


@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
@pytest.mark.parametrize("function", [clamp_data, clamp_array])
def test_what_is_written_behind_autograds_back_is_there_in_the_first_batch(function, backward):
    plain = nn.Sequential(Affine(), Apply(function))
    pipe = on_cpu(copy.deepcopy(plain), [1, 1], chunks=1, checkpoint="always", backward=backward, workers="never")
    torch.testing.assert_close(pipe(ones(2)), plain(ones(2)))


@pytest.mark.parametrize("workers", ["never", "always"])
def test_the_first_layer_may_leave_grad_mode_off(workers):
    """Its input needs a gradient, and so a copy of it, made while grad mode was on, does."""

    def off(x):
        torch.set_grad_enabled(False)
        return x

    pipe = on_cpu(
        nn.Sequential(Apply(off), Affine()), [1, 1], chunks=2, checkpoint="never", backward="scheduled", workers=workers
    )
    for _ in range(2):
        x = ones(4).requires_grad_()
        pipe(x).sum().backward()
        torch.testing.assert_close(x.grad, pipe[1].linear.weight.detach().sum(0).expand(4, WIDTH))
