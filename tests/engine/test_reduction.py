"""The loss of ``pipe.step`` is that of the whole batch, however it reduces: losses of PyTorch and others."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench import NoChunk
from gpipe_bench.engine.goal import _KNOWN
from gpipe_bench.errors import ReductionWarning
from tests.engine.steps import scheduled

CLASSES = 5
ROWS = 7
# These take other arguments than (output, target), or give no tensor.
OTHERS = {
    "CosineEmbeddingLoss", "CTCLoss", "MarginRankingLoss", "TripletMarginLoss", "TripletMarginWithDistanceLoss",
}  # fmt: skip
# One has a layer of its own, one takes the variance, too.
PLAIN = [
    function
    for function in _KNOWN
    if function not in (getattr(functional, "linear_cross_entropy", None), functional.gaussian_nll_loss)
]

numbers = torch.rand(ROWS, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
signs = numbers.sub(0.5).sign()
classes = torch.tensor([0, 4, 2, 2, 1, 3, 0])
padded = torch.tensor([0, 4, -100, 2, -100, -100, -100])  # in three micro-batches, the last has no label
weight = torch.tensor([0.5, 2, 0, 1, 3], dtype=torch.float64)
several = torch.full((ROWS, CLASSES), -1).index_fill(1, torch.tensor([0]), 2)
TARGETS = {
    functional.binary_cross_entropy: numbers,
    functional.binary_cross_entropy_with_logits: numbers,
    functional.hinge_embedding_loss: signs,
    functional.kl_div: numbers,
    functional.multi_margin_loss: classes,
    functional.multilabel_margin_loss: several,
    functional.multilabel_soft_margin_loss: numbers.round(),
    functional.soft_margin_loss: signs,
    functional.cross_entropy: padded,
    functional.nll_loss: padded,
}


def chain():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES), nn.Softmax(1))
    return layers.double()


def batch():
    return torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def check(loss, target, schedule="1f1b", *, chunks=3, **options):
    """One step against the plain module, without a warning."""
    plain = chain()
    pipe = scheduled(copy.deepcopy(plain), [1, 1, 1, 1], schedule, chunks=chunks)
    expected = loss(plain(batch()), target)
    expected.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReductionWarning)
        found = pipe.step(batch(), target, loss, **options)
    torch.testing.assert_close(found, expected.detach().reshape(()), equal_nan=True)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(pipe.named_parameters())[name].grad, parameter.grad)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss:UserWarning")  # kl_div's own
@pytest.mark.parametrize("schedule", [None, "gpipe", "zb_h1"])
@pytest.mark.parametrize(
    ("function", "reduction"),
    [(function, reduction) for function in PLAIN for reduction in ("mean", "sum")] + [(functional.kl_div, "batchmean")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_losses_of_pytorch(function, reduction, schedule):
    target = TARGETS.get(function, numbers)
    check(partial(function, reduction=reduction), target, schedule)
    check(_KNOWN[function](reduction=reduction), target, schedule)


@pytest.mark.parametrize(
    ("settings", "target"),
    [
        ({}, padded),
        ({"ignore_index": 2}, classes),
        ({"weight": weight}, classes),
        ({"weight": weight}, torch.full((ROWS,), 2).index_fill(0, torch.tensor([0]), 1)),
        ({"weight": weight, "ignore_index": 0, "label_smoothing": 0.1}, classes),
        ({"weight": weight, "reduction": "sum"}, padded),
        ({"label_smoothing": 0.1}, padded),
        ({"weight": weight, "label_smoothing": 0.1}, numbers),
        ({}, classes.to(torch.uint8)),
    ],
    ids=["padding", "ignored", "weights", "one-weight", "all", "sum", "smoothing", "probabilities", "bytes"],
)
def test_settings_of_cross_entropy(settings, target):
    check(nn.CrossEntropyLoss(**settings), target)
    check(partial(functional.cross_entropy, **settings), target)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_with_a_variance(reduction):
    check(partial(functional.gaussian_nll_loss, var=0.5, reduction=reduction), numbers)


@pytest.mark.parametrize(
    ("loss", "target", "reduction"),
    [
        (nn.CrossEntropyLoss(weight=weight), padded, "mean"),
        (nn.KLDivLoss(reduction="batchmean"), numbers, "mean"),
        (partial(functional.mse_loss, reduction="sum"), numbers, "sum"),
    ],
    ids=["labels", "batchmean", "sum"],
)
def test_the_reduction_of_a_known_loss_may_be_given(loss, target, reduction):
    check(loss, target, reduction=reduction)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "mean"),
        (functional.cross_entropy, "sum"),
        (nn.CrossEntropyLoss(weight=weight), len),
    ],
    ids=["sum", "mean", "function"],
)
def test_another_reduction_of_a_known_loss_is_refused(loss, given, chunks):
    pipe = scheduled(chain(), [1, 1, 1, 1], "1f1b", chunks=chunks)
    with pytest.raises(ValueError, match=r"reduction must be that of the loss, '(mean|sum)', got .*; leave it out"):
        pipe.step(batch(), classes, loss, reduction=given)


@pytest.mark.parametrize(("name", "value"), [("size_average", False), ("reduce", True)])
def test_a_deprecated_way_to_set_the_reduction_of_a_function_is_refused(name, value):
    pipe = scheduled(chain(), [1, 1, 1, 1], "1f1b", chunks=2)
    with pytest.raises(ValueError, match=f"loss must say by reduction how it reduces, got {name}={value}; pass"):
        pipe.step(batch(), classes, partial(functional.cross_entropy, **{name: value}))


def test_a_known_loss_that_reduces_nothing_is_refused_for_one_row_too():
    pipe = scheduled(chain(), [1, 1, 1, 1], "1f1b", chunks=ROWS)
    with pytest.raises(TypeError, match="loss must give one number in a tensor, got one with reduction='none'; take"):
        pipe.step(batch(), classes, nn.CrossEntropyLoss(reduction="none"))


def test_defaults_of_a_function():
    check(functional.cross_entropy, padded)
    check(functional.mse_loss, numbers)


def test_a_class_derived_from_a_loss():
    class Padded(nn.CrossEntropyLoss):
        def __init__(self):
            super().__init__(ignore_index=2)

    check(Padded(), classes)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="since PyTorch 2.13")
def test_a_loss_with_a_layer_of_its_own():
    loss = nn.LinearCrossEntropyLoss(CLASSES, CLASSES, dtype=torch.float64)
    check(loss, padded)
    found, loss.linear.weight.grad = loss.linear.weight.grad, None
    loss(chain()(batch()), padded).backward()
    torch.testing.assert_close(found, 2 * loss.linear.weight.grad)  # of the step, and of the plain module


def test_a_batch_without_any_label():
    check(nn.CrossEntropyLoss(), torch.full((ROWS,), -100))


def test_a_label_for_each_place():
    """(N, C, d) and (N, d)."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2))).double()
    target = torch.tensor([[0, 1], [-100, -100], [1, 1], [0, -100], [1, -100]])
    x = batch()[:5]
    pipe = scheduled(copy.deepcopy(plain), [1, 1], "1f1b", chunks=3)
    expected = functional.cross_entropy(plain(x), target)
    expected.backward()
    torch.testing.assert_close(pipe.step(x, target, functional.cross_entropy), expected.detach())
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


def test_every_loss_of_torch_nn_is_known_or_takes_other_arguments():
    losses = {name for name in nn.modules.loss.__all__ if name.endswith("Loss")}
    assert losses - {kind.__name__ for kind in _KNOWN.values()} == OTHERS


# --- losses of one's own ---------------------------------------------------------------------------------------------


def over_labels(output, target):
    """The mean over labels other than 0; nan without any."""
    mask = target != 0
    return (output.gather(1, target[:, None])[:, 0] * mask).sum() / mask.sum()


@pytest.mark.parametrize("chunks", [1, 3, 7])
@pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b", "zb_h1"])
def test_a_function_gives_the_weight_of_each_microbatch(schedule, chunks):
    check(over_labels, classes, schedule, chunks=chunks, reduction=lambda target: (target != 0).sum())


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_a_sum(schedule):
    check(lambda output, target: (output - target).abs().sum(), numbers, schedule, reduction="sum")


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_a_mean(schedule):
    check(lambda output, target: (output - target).abs().mean(), numbers, schedule, reduction="mean")


def test_how_an_unknown_loss_is_taken_is_said():
    pipe = scheduled(chain(), [1, 1, 1, 1], "1f1b", chunks=3)
    with pytest.warns(ReductionWarning, match=r"over_labels is none of PyTorch's losses.* reduction='mean'") as seen:
        pipe.step(batch(), classes, over_labels)
    assert [(each.filename, len(str(each.message).splitlines())) for each in seen] == [(__file__, 1)]


@pytest.mark.parametrize("given", ["none", 3])
def test_a_reduction_that_does_not_exist(given):
    pipe = scheduled(chain(), [1, 1, 1, 1], "1f1b", chunks=3)
    with pytest.raises(ValueError, match=f"reduction must be 'mean', 'sum' or a function of .*, got {given!r}"):
        pipe.step(batch(), classes, over_labels, reduction=given)


@pytest.mark.filterwarnings("error")
def test_a_module_in_a_partial_is_a_loss_of_ones_own():
    pipe = scheduled(chain(), [1, 1, 1, 1], "1f1b", chunks=3)
    with pytest.warns(ReductionWarning, match="a partial of CrossEntropyLoss is none of PyTorch's losses"):
        pipe.step(batch(), classes, partial(nn.CrossEntropyLoss()))


@pytest.mark.parametrize("weights", [[0, 0, 0], [1, -1, 2], [1, float("nan"), 1], [1, None, 1], [1, torch.ones(2), 1]])
def test_weights_that_are_none(weights):
    pipe = scheduled(chain(), [1, 1, 1, 1], "1f1b", chunks=3)
    given = iter(weights)
    with pytest.raises(
        ValueError, match="weights of micro-batches must be numbers of at least 0, and one of them more"
    ):
        pipe.step(batch(), classes, over_labels, reduction=lambda target: next(given))


# --- targets in lists ------------------------------------------------------------------------------------------------


def to_texts(output, target):
    return sum((row.mean() - len(text)) ** 2 for row, text in zip(output, target, strict=True)) / len(output)


def to_boxes(output, target):
    """As in detection: a dict for each sample, with as many boxes as there are."""
    each = [(row.mean() - boxes["boxes"]).square().sum() for row, boxes in zip(output, target, strict=True)]
    return torch.stack(each).mean()


texts = ["a", "bb", "", "dddd", "e", "ffffff", "gg"]
boxes = [{"boxes": torch.ones(count, 4, dtype=torch.float64), "label": "x"} for count in (7, 0, 2, 3, 7, 1, 2)]


@pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b"])
@pytest.mark.parametrize(("loss", "target"), [(to_texts, texts), (to_boxes, boxes)], ids=["texts", "dicts"])
def test_a_list_with_an_item_per_sample_is_split(loss, target, schedule):
    check(loss, target, schedule, reduction="mean")


def test_several_targets_in_a_tuple():
    check(lambda output, target: ((output - target[0]) * target[1]).mean(), (numbers, signs), reduction="mean")


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_a_target_may_lack(schedule):
    check(lambda output, target: (output - target["a"]).square().mean(), {"a": numbers, "b": None}, schedule,
          reduction="mean")  # fmt: skip
    check(lambda output, target: output.square().mean().reshape(1), None, schedule, reduction="mean")


PER_SAMPLE = "pass one of these, several targets in a dict, and constants to the loss by functools.partial"


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("1f1b", 3), (None, 3)])
@pytest.mark.parametrize(
    ("target", "error", "got"),
    [
        (numbers[:-1], ValueError, "batch size 7, got a tensor of 6; pass one batch"),
        (texts[:-1], ValueError, "batch size 7, got a list of 6"),
        ([numbers, signs], ValueError, "batch size 7, got a list of 2; .* several targets in a tuple"),
        ({"a": numbers, "b": texts[:-1]}, ValueError, "batch size 7, got a list of 6"),
        (numbers.numpy(), TypeError, f"got ndarray; {PER_SAMPLE}"),
        (NoChunk(numbers), TypeError, f"got NoChunk; {PER_SAMPLE}"),
        (range(ROWS), TypeError, "got range"),
        (deque(numbers), TypeError, "got deque"),
        ("text", TypeError, "got str"),
        (tuple(texts), TypeError, "got str"),
        (tuple(range(ROWS)), TypeError, "got int"),
        (tuple(classes), TypeError, "got a tensor without rows"),
        ({"a": numbers, "b": 0.5}, TypeError, "got float"),
        ({"a": tuple({"boxes": numbers} for _ in range(ROWS))}, TypeError, "got a tuple of 7 tuples or dicts for as"),
        (((numbers, numbers),) * ROWS, TypeError, "got a tuple of 7 tuples or dicts for as many samples"),
    ],
)
def test_other_collections_are_refused(target, error, got, schedule, chunks):
    pipe = scheduled(chain(), [1, 1, 1, 1], schedule, chunks=chunks)
    with pytest.raises(error, match=got):
        pipe.step(batch(), target, to_texts, reduction="mean")
