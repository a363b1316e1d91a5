"""What a caller may do with its batch, the output and the model around a call: as with the plain module."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipe_bench import GPipe
from tests.engine.steps import samples
from tests.engine.support import MODES, Affine, Mix, assert_same, on_cpu, score, train_step

both_executors = pytest.mark.parametrize("schedule", [None, "gpipe"])
every_mode = pytest.mark.parametrize("checkpoint", MODES)
both_workers = pytest.mark.parametrize("workers", ["always", "never"])


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Mix(), Mix(), Affine()).double()


def x(rows: int = 6, *, requires_grad: bool = False) -> Tensor:
    return samples(rows, 3, requires_grad=requires_grad)


# --- the batch is written to -----------------------------------------------------------------------------------------

WRITES = {
    "copied over": lambda batch: batch.copy_(batch + 1),
    "zeroed": lambda batch: batch.zero_(),
    "a row": lambda batch: batch[-1].fill_(7),
    "a view": lambda batch: batch.view(-1).mul_(2),
}


@both_executors
@both_workers
@every_mode
@pytest.mark.parametrize("write", WRITES)
def test_a_batch_that_is_written_to_before_the_backward_pass_raises(write, checkpoint, workers, schedule):
    """The next batch in the same buffer: gradients would be those of neither."""
    pipe = on_cpu(plain_model(), [1, 2], chunks=3, checkpoint=checkpoint, workers=workers, schedule=schedule)
    for _ in range(2):
        batch = x()
        loss = score(pipe(batch))
        WRITES[write](batch)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    pipe.zero_grad()
    assert_same(train_step(pipe, x()), train_step(plain_model(), x()))


@both_executors
@every_mode
def test_a_single_microbatch_raises_too_or_has_the_gradients_of_the_batch_as_it_was(checkpoint, schedule):
    """The first task of all works on a copy, to see whether its layers write to the batch."""
    expected = train_step(plain_model(), x())
    pipe = on_cpu(plain_model(), [1, 2], chunks=1, checkpoint=checkpoint, schedule=schedule)
    batch = x()
    loss = score(pipe(batch))
    batch.zero_()
    refusal = ""
    try:
        loss.backward()
    except RuntimeError as error:
        refusal = str(error)
    if refusal:
        assert "modified by an inplace operation" in refusal
    else:
        found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
        torch.testing.assert_close(found, expected.gradients)
    batch = x()
    loss = score(pipe(batch))
    batch.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@both_executors
@every_mode
def test_a_batch_may_be_written_to_after_the_backward_pass(checkpoint, schedule):
    plain = plain_model()
    pipe = on_cpu(copy.deepcopy(plain), [1, 2], chunks=3, checkpoint=checkpoint, schedule=schedule)
    for model in (plain, pipe):
        batch = x()
        for _ in range(3):
            score(model(batch)).backward()
            batch.add_(1)
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


# --- what the plain module allows -------------------------------------------------------------------------------------


def grads(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def output_written_to(model):
    output = model(x())
    output.mul_(2)
    output[:, 0].zero_()
    torch.relu_(output).sin().sum().backward()
    return output


def output_of_an_output(model):
    score(model(model(x()))).backward()


def two_outputs_in_one_loss(model):
    (model(x()) * model(x() + 1)).sum().backward()


def part_of_the_output(model):
    """Two rows of two micro-batches; the third gets no gradient."""
    score(model(x())[1:3]).backward()


def a_gradient_of_ones_own(model):
    output = model(x())
    output.backward(torch.full_like(output, 3))


def hooks_of_the_output(model):
    output = model(x())
    output.retain_grad()
    output.register_hook(lambda grad: grad * 3)
    score(output).backward()
    return output.grad


def within_anomaly_detection(model):
    with torch.autograd.set_detect_anomaly(True):
        score(model(x())).backward()


def gradients_zeroed_between(model):
    loss = score(model(x()))
    model.zero_grad()
    loss.backward()


def a_weight_frozen_between(model):
    loss, weight = score(model(x())), next(model.parameters())
    weight.requires_grad_(requires_grad=False)
    try:
        loss.backward()
    finally:
        weight.requires_grad_()


def evaluation_between(model):
    loss = score(model(x()))
    model.eval()
    loss.backward()
    model.train()


def a_backward_pass_in_another_thread(model):
    loss = score(model(x()))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def a_backward_pass_without_grad_mode(model):
    loss = score(model(x()))
    with torch.no_grad():
        loss.backward()


def another_batch_between(model):
    loss = score(model(x()))
    with torch.no_grad():
        model(x() + 3)
    loss.backward()


def a_batch_that_is_no_leaf(model):
    leaf = x(requires_grad=True)
    score(model(leaf * 2)).backward()
    return leaf.grad


def a_batch_that_is_a_parameter(model):
    leaf = nn.Parameter(x())
    score(model(leaf)).backward()
    return leaf.grad


def a_batch_of_one_row_expanded(model):
    score(model(x(1).expand(6, 3))).backward()


def a_batch_with_strides(model):
    score(model(samples(12, 6, requires_grad=False)[::2, ::2])).backward()


def a_batch_without_rows(model):
    leaf = x(0, requires_grad=True)
    model(leaf).sum().backward()
    return leaf.grad


def a_batch_that_is_gone(model):
    batch = x()
    loss = score(model(batch))
    del batch
    loss.backward()


def two_batches_backward_in_turn(model):
    losses = [score(model(x() * factor)) for factor in (1, 2)]
    losses[1].backward()
    losses[0].backward()


def layers_frozen_after_a_batch(model):
    score(model(x())).backward()
    model.zero_grad()
    model[0].requires_grad_(requires_grad=False)
    score(model(x())).backward()
    model[0].requires_grad_()


def a_graph_retained(model):
    score(model(x())).backward(retain_graph=True)


def within_another_checkpoint(model):
    leaf = x(requires_grad=True)
    score(torch_checkpoint(model, leaf, use_reentrant=True)).backward()
    score(torch_checkpoint(model, leaf, use_reentrant=False)).backward()
    return leaf.grad


ALLOWED = [
    two_batches_backward_in_turn,
    layers_frozen_after_a_batch,
    a_graph_retained,
    within_another_checkpoint,
    output_written_to,
    output_of_an_output,
    two_outputs_in_one_loss,
    part_of_the_output,
    a_gradient_of_ones_own,
    hooks_of_the_output,
    within_anomaly_detection,
    gradients_zeroed_between,
    a_weight_frozen_between,
    evaluation_between,
    a_backward_pass_in_another_thread,
    a_backward_pass_without_grad_mode,
    another_batch_between,
    a_batch_that_is_no_leaf,
    a_batch_that_is_a_parameter,
    a_batch_of_one_row_expanded,
    a_batch_with_strides,
    a_batch_without_rows,
    a_batch_that_is_gone,
]


@both_executors
@both_workers
@every_mode
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("case", ALLOWED, ids=lambda case: case.__name__)
def test_what_the_plain_module_allows(case, checkpoint, workers, schedule):
    plain = plain_model()
    expected = case(plain)
    for chunks, transfer in ((3, "direct"), (3, "host"), (1, "direct")):
        pipe: GPipe = on_cpu(
            copy.deepcopy(plain), [1, 2],
            chunks=chunks, checkpoint=checkpoint, workers=workers, schedule=schedule, transfer=transfer,
        )  # fmt: skip
        pipe.zero_grad()
        torch.testing.assert_close(case(pipe), expected)
        torch.testing.assert_close(grads(pipe), grads(plain))
