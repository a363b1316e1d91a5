"""Checkpointing: what runs twice, what layers are told, and what autograd may still be asked for."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import Components, is_checkpointing, is_recomputing
from gpipe_bench.engine.context import ExecutionContext
from gpipe_bench.errors import UnsupportedError
from tests.engine.support import (
    MODES,
    SOME,
    WIDTH,
    Affine,
    Do,
    Flags,
    InPlace,
    Mix,
    assert_same,
    label,
    on_cpu,
    train_step,
)

PLAIN, FIRST, AGAIN = (False, False), (True, False), (False, True)


def ones(size: int) -> Tensor:
    return torch.ones(size, WIDTH)


def flags_of_a_step(size=4, chunks=4, **options) -> list[tuple[bool, bool]]:
    layer = Flags()
    pipe = on_cpu(nn.Sequential(layer), [1], chunks=chunks, **options)
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


def test_mode_and_chunks_may_change_between_batches():
    layer = Flags()
    pipe = on_cpu(nn.Sequential(layer), [1], chunks=4, checkpoint="always")
    pipe.checkpoint, pipe.chunks = "never", 2
    pipe(ones(4))
    assert layer.seen == [PLAIN] * 2


def test_flags_belong_to_a_thread():
    """While one partition runs its first pass, the calling thread and other workers are told nothing of it."""
    inside, asked = threading.Event(), threading.Event()
    elsewhere = []

    def hold(x):
        inside.set()
        assert asked.wait(timeout=30)
        return x * torch.ones(1, requires_grad=True)

    def ask():
        inside.wait(timeout=30)
        elsewhere.append((is_checkpointing(), is_recomputing()))
        asked.set()

    thread = threading.Thread(target=ask)
    thread.start()
    on_cpu(nn.Sequential(Do(hold), Mix()), [1, 1], chunks=2, checkpoint="always")(ones(2))
    thread.join()
    assert elsewhere == [PLAIN]


def test_flags_and_grad_mode_come_and_go_with_blocks():
    def applied(**options):
        return ExecutionContext.capture([torch.device("cpu")]).applied(**options)

    def flags():
        return is_checkpointing(), is_recomputing(), torch.is_grad_enabled()

    seen = [flags()]
    with applied(checkpointing=True):
        seen.append(flags())
        with applied(recomputing=True):
            seen.append(flags())
        seen.append(flags())
    plain, first, again = (*PLAIN, True), (*FIRST, False), (*AGAIN, True)
    assert [*seen, flags()] == [plain, first, again, first, plain]


def test_flags_are_back_after_an_exception():
    def fail(x):
        raise ValueError("as it must")

    pipe = on_cpu(nn.Sequential(Do(fail), Flags()), [2], checkpoint="always")
    with pytest.raises(ValueError, match="as it must"):
        pipe(ones(1).requires_grad_())
    assert (is_checkpointing(), is_recomputing()) == PLAIN


# --- what needs a gradient --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [None, "1f1b", "zb_h1"])
def test_a_partition_is_recomputed_for_its_weights_or_for_what_comes_before(schedule):
    """Not where it has nothing to learn and nobody asks for the gradient of its input."""
    layers = [Flags() for _ in range(3)]
    for frozen in (layers[0], layers[2]):
        frozen.requires_grad_(requires_grad=False)
    pipe = on_cpu(nn.Sequential(*layers), [1] * 3, chunks=2, checkpoint="always", schedule=schedule)
    pipe.step(ones(2), ones(2), nn.functional.mse_loss)
    assert layers[0].seen == [PLAIN] * 2
    assert [sorted(layer.seen) for layer in layers[1:]] == [[AGAIN] * 2 + [FIRST] * 2] * 2


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize(
    ("schedule", "components"), [*((None, each) for each in SOME), ("1f1b", SOME[0]), ("zb_h1", SOME[0])], ids=label
)
def test_no_gradient_is_computed_for_a_batch_that_needs_none(schedule, components, checkpoint):
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
            asked.append(x.requires_grad)
            return Scale.apply(x, self.weight)

    options = {"checkpoint": checkpoint, "components": components, "schedule": schedule, "transfer": "host"}
    pipe = on_cpu(nn.Sequential(Scaled(), nn.Linear(3, 3)), [1, 1], chunks=4, **options)
    pipe.step(ones(8), ones(8), nn.functional.mse_loss)
    runs = 4 + {"always": 4, "except_last": 3, "never": 0}[checkpoint]
    assert asked == (runs + 4) * [False]


@pytest.mark.parametrize("schedule", [None, "1f1b", "zb_h1"])
@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("fork_join", [True, False])
def test_what_needs_no_gradient_before_a_boundary_needs_none_behind_it(transfer, fork_join, schedule):
    """Unless it was computed under a checkpoint, whose first pass cannot know."""
    seen = set()

    def product(values):
        seen.add(tuple(value.requires_grad for value in values))
        return values[0] * values[1]

    layers = nn.Sequential(nn.Sequential(Mix(), Do(lambda x: (x, x.detach()))), Do(product))
    options = {"checkpoint": "never", "transfer": transfer, "components": Components(fork_join=fork_join)}
    on_cpu(layers, [1, 1], chunks=3, schedule=schedule, **options).step(ones(6), ones(6), nn.functional.mse_loss)
    assert seen == {(True, False)}


@pytest.mark.parametrize("schedule", [None, "1f1b"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_a_nested_tensor_must_be_jagged(schedule):
    layers = nn.Sequential(
        nn.Sequential(Mix(), Do(lambda x: torch.nested.nested_tensor([*x]))), Do(lambda x: x.to_padded_tensor(0.0))
    )
    pipe = on_cpu(layers, [1, 1], checkpoint="always", schedule=schedule)
    with pytest.raises(UnsupportedError, match=r"must be jagged, got .* make it with layout=torch\.jagged"):
        pipe.step(ones(7), ones(7), nn.functional.mse_loss)


# --- in-place layers ------------------------------------------------------------------------------------------------


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


PASSING = {
    "identity": (nn.Identity, True),
    "view": (lambda: nn.Flatten(0), True),
    "part": (lambda: Do(lambda x: x[1:, ::2]), True),
    "transposed": (lambda: Do(Tensor.t), True),
    "sums": (lambda: Do(lambda x: x + 1), False),
    "writes": (InPlace, False),
    "negated": (lambda: Do(torch._neg_view), None),
}


@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("name", PASSING)
def test_after_the_first_task_inputs_are_copied_only_for_layers_that_write_to_them(name, schedule):
    """The first task works on a copy, which shows whether they do."""
    make, same = PASSING[name]
    before = Places()
    plain = nn.Sequential(Affine(), make())
    pipe = on_cpu(
        nn.Sequential(nn.Sequential(copy.deepcopy(plain[0]), before), make()), [1, 1], chunks=1,
        checkpoint="always", schedule=schedule, workers="never",
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


@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("function", [clamp_data, clamp_array])
def test_what_is_written_behind_autograds_back_is_there_in_the_first_batch(function, schedule):
    plain = nn.Sequential(Affine(), Do(function))
    pipe = on_cpu(copy.deepcopy(plain), [1, 1], chunks=1, checkpoint="always", schedule=schedule, workers="never")
    torch.testing.assert_close(pipe(ones(2)), plain(ones(2)))
