"""Results of micro-batches that cannot be put together, and layers without numbers, are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench import GPipe, Pipe
from tests.engine.support import Do, on_cpu

BOTH = pytest.mark.parametrize("kind", [GPipe, Pipe])


def piped(kind, *layers, **options):
    module = nn.Sequential(*layers)
    if kind is Pipe:
        return Pipe(module, balance=[1] * len(layers), **options)
    return on_cpu(module, [1] * len(layers), **options)


def zeros(x):
    """(N, 4) -> (N, as many as the first element says)."""
    return x.new_zeros(len(x), int(x[0, 0]))


@BOTH
def test_results_of_other_lengths(kind):
    pipe = piped(kind, nn.Identity(), Do(zeros), chunks=2)
    message = r"agree in all dimensions but the first, got \[1, 3\], \[1, 5\]; pad them in the last layer, or call pipe"
    with pytest.raises(ValueError, match=message):
        pipe(torch.tensor([[3.0], [5.0]]))


@BOTH
def test_results_that_are_jagged(kind):
    jagged = torch.nested.nested_tensor([torch.rand(2, 4), torch.rand(3, 4)], layout=torch.jagged)
    pipe = piped(kind, nn.Linear(4, 4), chunks=2)
    with pytest.raises(ValueError, match=r"be tensors that torch\.cat takes, got nested ones of shapes .*; pad"):
        pipe(jagged)


def sometimes_sparse(x):
    return x.to_sparse() if x[0, 0] > 0 else x


@BOTH
def test_other_errors_of_gathering_stay(kind):
    pipe = piped(kind, Do(sometimes_sparse), chunks=2)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"(?i)sparse"):
        pipe(torch.tensor([[1.0], [-1.0]]))


def sometimes(x):
    """A tuple, or a tensor."""
    return (x, x) if x[0, 0] > 0 else x


@BOTH
@pytest.mark.parametrize("signs", [(1.0, -1.0), (-1.0, 1.0)])
def test_results_of_other_forms(kind, signs):
    pipe = piped(kind, Do(sometimes), chunks=2)
    message = r"results of all micro-batches must have one form, got .*; return the same tuple from every one"
    with pytest.raises(TypeError, match=message):
        pipe(torch.tensor(signs).unsqueeze(1))


def test_layers_without_numbers_are_not_put_on_a_device():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ValueError, match=r"got partition 1 on 'meta'; call module.to_empty\(device='cpu'\) and init"):
        on_cpu(layers, [1, 1])


def test_a_pipeline_without_numbers_stays_so():
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4, device="meta")))
    pipe.load_state_dict(nn.Sequential(nn.Linear(4, 4)).state_dict(), assign=True)
    with pytest.raises(ValueError, match="device meta, got cpu; make the pipeline of layers that have numbers, after"):
        pipe(torch.rand(6, 4))
