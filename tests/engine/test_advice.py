"""Errors whose reason is the pipeline say so, and what to change."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import gaussian_nll_loss, mse_loss

from gpipe_bench import GPipe, Pipe
from tests.engine.support import Do, on_cpu

X = torch.rand(6, 4)
BOTH = pytest.mark.parametrize("kind", [GPipe, Pipe])


def piped(kind, *layers, **options):
    module = nn.Sequential(*layers)
    if kind is Pipe:
        return Pipe(module, balance=[1] * len(layers), **options)
    return on_cpu(module, [1] * len(layers), **options)


def notes_of(error_type, message, call):
    with pytest.raises(error_type, match=message) as caught:
        call()
    return getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("schedule", [None, "zb_h1"])
@pytest.mark.parametrize("checkpointed", ["always", "never"])
@pytest.mark.parametrize(
    ("rows", "chunks", "got"),
    [
        (5, 4, "got 5 rows in 3 micro-batches, the last with one; use chunks=2, or a larger batch."),
        (4, 4, "got 4 rows in 4 micro-batches, the last with one; use chunks=2, or a larger batch."),
        (7, 3, "got 7 rows in 3 micro-batches, the last with one; use chunks=2, or a larger batch."),
        (1, 1, "got 1 rows in 1 micro-batches, the last with one; use a larger batch."),
    ],
)
def test_batch_normalisation_of_one_row(rows, chunks, got, checkpointed, schedule):
    pipe = piped(GPipe, nn.Linear(4, 4), nn.BatchNorm1d(4), chunks=chunks, checkpoint=checkpointed, schedule=schedule)
    call = partial(pipe.step, torch.rand(rows, 4), torch.rand(rows, 4), mse_loss)
    (note,) = notes_of(ValueError, "Expected more than 1 value per channel", call)
    assert note == f"A micro-batch must have at least 2 rows for batch normalisation, {got}"


def test_batch_normalisation_that_gets_one_row_of_several_is_no_matter_of_chunks():
    def first_row(x):
        return x[:1]

    pipe = piped(GPipe, Do(first_row), nn.BatchNorm1d(4), chunks=2)
    assert notes_of(ValueError, "Expected more than 1 value", partial(pipe, X)) == []


def zeros(x):
    """(N, 4) -> (N, as many as the first element says)."""
    return x.new_zeros(len(x), int(x[0, 0]))


@BOTH
def test_results_of_other_lengths(kind):
    pipe = piped(kind, nn.Identity(), Do(zeros), chunks=2)
    message = r"agree in all dimensions but the first, got \[1, 3\], \[1, 5\]; pad them in the last layer, or call pipe"
    assert notes_of(ValueError, message, partial(pipe, torch.tensor([[3.0], [5.0]]))) == []


@BOTH
def test_results_that_are_jagged(kind):
    jagged = torch.nested.nested_tensor([torch.rand(2, 4), torch.rand(3, 4)], layout=torch.jagged)
    pipe = piped(kind, nn.Linear(4, 4), chunks=2)
    notes_of(ValueError, r"be tensors that torch\.cat takes, got nested ones of shapes .*; pad", partial(pipe, jagged))


def sometimes_sparse(x):
    return x.to_sparse() if x[0, 0] > 0 else x


@BOTH
def test_other_errors_of_gathering_stay(kind):
    pipe = piped(kind, Do(sometimes_sparse), chunks=2)
    with torch.no_grad():
        notes_of(RuntimeError, "(?i)sparse", partial(pipe, torch.tensor([[1.0], [-1.0]])))


def sometimes(x):
    """A tuple, or a tensor."""
    return (x, x) if x[0, 0] > 0 else x


@BOTH
@pytest.mark.parametrize("signs", [(1.0, -1.0), (-1.0, 1.0)])
def test_results_of_other_forms(kind, signs):
    pipe = piped(kind, Do(sometimes), chunks=2)
    message = r"results of all micro-batches must have one form, got .*; return the same tuple from every one"
    notes_of(TypeError, message, partial(pipe, torch.tensor(signs).unsqueeze(1)))


class Jagged(nn.Module):
    """(N, T, C) -> rows of lengths 1, 2, ..."""

    def forward(self, x):
        rows = [row[: i + 1] for i, row in enumerate(x)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def padded(x):
    x = x[1] if isinstance(x, tuple) else x
    return x.to_padded_tensor(0.0, output_size=(x.size(0), 3, 4))


class Both(Jagged):
    """The input, and the rows."""

    def forward(self, x):
        return x, super().forward(x)


@pytest.mark.parametrize("layer", [Jagged(), Both()], ids=["jagged", "both"])
@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_jagged_tensors_between_checkpointed_partitions(schedule, layer):
    pipe = piped(GPipe, nn.Linear(4, 4), layer, Do(padded), chunks=2, checkpoint="always", schedule=schedule)
    loss = pipe(torch.rand(6, 3, 4)).sum()
    (note,) = notes_of(RuntimeError, "shape", loss.backward)
    assert note == (
        "A checkpointed layer must give the same when it runs again, got another shape in the recomputation; draw "
        "random numbers from torch, hand on jagged tensors as values and offsets, or use checkpoint='never'."
    )


@pytest.mark.parametrize("chunks", [2, 6])
@pytest.mark.parametrize(
    "loss",
    [
        nn.BCEWithLogitsLoss(weight=torch.rand(6, 1)),
        nn.BCEWithLogitsLoss(pos_weight=torch.rand(6, 4)),
        nn.BCELoss(weight=torch.rand(6, 1)),
        partial(mse_loss, weight=torch.rand(6, 4)),
        partial(gaussian_nll_loss, var=torch.ones(6)),
    ],
    ids=["weight", "pos_weight", "probabilities", "mse_loss", "variance"],
)
def test_a_loss_that_holds_a_row_per_sample(loss, chunks):
    pipe = piped(GPipe, nn.Linear(4, 4), nn.Sigmoid(), chunks=chunks, schedule="1f1b")
    (note,) = notes_of((RuntimeError, ValueError), "size|shape", partial(pipe.step, X, X, loss))
    assert note.startswith("A loss sees one micro-batch at a time, got one that holds a tensor of shape [6")
    assert note.endswith("pass it with the target, as in (target, weight).")


def test_layers_without_numbers_are_not_put_on_a_device():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ValueError, match=r"got partition 1 on 'meta'; call module.to_empty\(device='cpu'\) and init"):
        on_cpu(layers, [1, 1])


def test_a_pipeline_without_numbers_stays_so():
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4, device="meta")))
    pipe.load_state_dict(nn.Sequential(nn.Linear(4, 4)).state_dict(), assign=True)
    with pytest.raises(ValueError, match="device meta, got cpu; make the pipeline of layers that have numbers, after"):
        pipe(X)
