"""Recurrent layers are fused: three operations, however long the sequence, with PyTorch's results in shape."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench.kernels.accelerator import accelerator_kernels
from tests.simulator_costs.layers import F32, flop, ops, trace

B, T, I, H = 4, 6, 5, 8  # noqa: E741 - sizes as the module under test names them
LSTM, GRU, RNN = nn.LSTM, nn.GRU, nn.RNN


class First(nn.Module):
    """Of what a recurrent layer gives, the outputs."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(I, H, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.parametrize(("kind", "gates"), [(LSTM, 4), (GRU, 3), (RNN, 1)])
def test_flops_are_those_of_its_products(kind, gates):
    traced = trace(nn.Sequential(First(kind)), B, T, I)
    one = 2 * B * T * gates * H
    assert flop(traced, "forward") == one * (I + H)
    # The input needs no gradient: two products for the weights, one back through the recurrence.
    assert flop(traced, "backward") == one * (I + 2 * H)


def test_as_many_operations_for_any_length_and_as_many_launches_as_moments():
    short, long = (trace(nn.Sequential(First(LSTM)), B, length, I) for length in (T, 10 * T))
    assert ops(short, "forward") == ops(long, "forward")
    assert ops(short, "backward") == ops(long, "backward")
    (kernel,) = (kernel for kernel in long.layers[0].kernels("forward") if kernel.op == "recurrence")
    weight = 4 * H * H * F32
    gates, output = B * 10 * T * 4 * H * F32, B * 10 * T * H * F32
    assert kernel.launches == 2 * 10 * T
    assert (kernel.whole.bytes_read, kernel.whole.bytes_written) == (gates + 10 * T * weight, output)


@pytest.mark.parametrize("kind", [LSTM, GRU, RNN])
@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True}, {"num_layers": 3, "dropout": 0.5}, {"batch_first": True}, {"bias": False}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_results_and_gradients_have_the_shapes_of_pytorch(kind, options):
    layer = kind(I, H, **options)
    rows = (B, T) if layer.batch_first else (T, B)
    expected = _flat(layer(torch.ones(*rows, I)))
    with torch.device("meta"), accelerator_kernels():
        found = _flat(layer.to("meta")(torch.ones(*rows, I)))
    assert [one.shape for one in found] == [one.shape for one in expected]
    sum(one.sum() for one in found).backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape


def test_projections_and_packed_sequences_are_left_to_pytorch():
    with torch.device("meta"), accelerator_kernels():
        projected = LSTM(I, H, proj_size=3)(torch.ones(T, B, I))
    assert [one.shape[-1] for one in _flat(projected)] == [3, 3, H]
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, I), torch.ones(2, I)])
    with accelerator_kernels():
        assert GRU(I, H)(packed)[0].data.shape == (5, H)


def _flat(value):
    return [value] if isinstance(value, torch.Tensor) else [one for item in value for one in _flat(item)]
