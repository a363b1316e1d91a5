"""What is one kernel on an accelerator is one here, with the memory that it keeps, though the meta device has many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_bench.kernels.accelerator import accelerator_kernels
from gpipe_bench.kernels.kernel import Alloc
from gpipe_bench.kernels.operations import tensors_of
from gpipe_bench.kernels.specs import TensorSpec
from gpipe_bench.simulator.tracing.layer_trace import trace_layer

ROWS, WIDTH, HEADS, LENGTH = 6, 8, 2, 16
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
has_kernel = hasattr(torch.ops.aten, "_fused_rms_norm_backward")
needs_rms_norm = pytest.mark.skipif(not has_kernel, reason="this PyTorch writes RMS norms out on CUDA, too")


class Call(nn.Module):
    """A function as a layer, with the module that it calls, if there is one."""

    def __init__(self, function, inner=None):
        super().__init__()
        self.function, self.inner = function, inner

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Written(nn.Module):
    """``nn.MultiheadAttention`` that gives weights, for the same tokens as queries, keys and values, batch first."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.inner = p, nn.Linear(WIDTH, 3 * WIDTH, device="meta")
        self.outer = nn.Linear(WIDTH, WIDTH, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x)
        parts = self.inner(x.transpose(0, 1)).unflatten(-1, (3, WIDTH)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        parts = parts.contiguous()
        query, key, value = [
            one.view(LENGTH, batch * HEADS, -1).transpose(0, 1) for one in (parts[0], parts[1], parts[2])
        ]
        scores = torch.bmm(query * 0.5, key.transpose(-2, -1)).softmax(-1)
        scores = functional.dropout(scores, self.p)
        mixed = torch.bmm(scores, value).transpose(0, 1).contiguous().view(LENGTH * batch, WIDTH)
        result = self.outer(mixed).view(LENGTH, batch, WIDTH).transpose(0, 1)
        scores.view(batch, HEADS, LENGTH, LENGTH).mean(1)
        return result


def trace(layer, *shape, dtype=F32):
    x = torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)
    return trace_layer(layer if isinstance(layer, nn.Module) else Call(layer), TensorSpec.of(x), {}).trace


def ops(traced, direction):
    return [kernel.op for kernel in traced.kernels(direction)]


def kept_bytes(traced):
    return sum(step.bytes for step in traced.forward if isinstance(step, Alloc) and step.block in traced.kept)


def test_dropout_in_attention_that_gives_weights_is_that_of_attention_written_out():
    inside = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True, device="meta")
    module, written = (
        trace(layer, ROWS, LENGTH, WIDTH) for layer in (Call(lambda x: inside(x, x, x)[0], inside), Written(0.1))
    )
    assert "native_dropout" in ops(module, "forward")
    for direction in ("forward", "backward"):
        assert ops(module, direction) == ops(written, direction)
    assert kept_bytes(module) == kept_bytes(written)


def test_attention_leaves_the_functions_of_pytorch_as_they_were_even_if_it_fails():
    before = functional.dropout, functional.scaled_dot_product_attention
    layer = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, device="meta")
    with pytest.raises(AssertionError, match="expecting embedding dimension"):
        trace(lambda x: layer(x, x, x)[0], ROWS, LENGTH, WIDTH + 1)
    assert (functional.dropout, functional.scaled_dot_product_attention) == before


@needs_rms_norm
@pytest.mark.parametrize(("dtype", "statistic"), [(BF16, 4), (F32, 4), (F64, 8)])
def test_an_rms_norm_is_one_kernel_each_way_and_keeps_a_number_per_row(dtype, statistic):
    traced = trace(nn.RMSNorm(WIDTH, device="meta", dtype=dtype), ROWS, LENGTH, WIDTH, dtype=dtype)
    (forward,) = traced.kernels("forward")
    backward, accumulation = traced.kernels("backward")
    assert (forward.op, backward.op, accumulation.op) == ("_fused_rms_norm", "_fused_rms_norm_backward", "add_")
    whole, rows, weight = ROWS * LENGTH * WIDTH * dtype.itemsize, ROWS * LENGTH * statistic, WIDTH * dtype.itemsize
    assert (forward.whole.bytes_read, forward.whole.bytes_written) == (whole + weight, whole + rows)
    assert (backward.whole.bytes_read, backward.whole.bytes_written) == (2 * whole + rows + weight, whole + weight)
    # The output is the layer's; the input is not an allocation of its own.
    assert kept_bytes(traced) == rows


@needs_rms_norm
@pytest.mark.parametrize("function", [functional.rms_norm, torch.rms_norm])
def test_an_rms_norm_without_a_weight_has_no_gradient_of_one(function):
    traced = trace(lambda x: function(x, (LENGTH, WIDTH)), ROWS, LENGTH, WIDTH)
    (backward,) = traced.kernels("backward")
    whole = ROWS * LENGTH * WIDTH * 4
    assert (backward.whole.bytes_read, backward.whole.bytes_written) == (2 * whole + ROWS * 4, whole)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_an_rms_norm_whose_weight_has_another_type_is_written_out():
    norm = nn.RMSNorm(WIDTH, device="meta")
    assert "rsqrt" in ops(trace(norm, ROWS, WIDTH, dtype=BF16), "forward")


def test_a_shape_that_does_not_fit_has_the_error_of_pytorch():
    with pytest.raises(RuntimeError, match="normalized_shape"):
        trace(lambda x: functional.rms_norm(x, (WIDTH + 1,)), ROWS, WIDTH)


def test_mish_goes_back_in_one_kernel_and_keeps_its_input():
    traced = trace(functional.mish, ROWS, WIDTH)
    whole = ROWS * WIDTH * 4
    assert ops(traced, "forward") == ["mish"]
    (backward,) = traced.kernels("backward")
    assert backward.op == "mish_backward"
    assert (backward.whole.bytes_read, backward.whole.bytes_written) == (2 * whole, whole)


def test_mish_in_place_keeps_a_copy_only_for_a_backward_pass():
    traced = trace(lambda x: functional.mish(x * 1, inplace=True), ROWS, WIDTH)
    assert ops(traced, "forward") == ["mul", "clone", "mish_"]
    assert ops(traced, "backward") == ["mish_backward", "mul"]
    assert [kernel.op for kernel in traced.kernels("plain")] == ["mul", "mish_"]


def test_a_cell_of_an_lstm_is_two_products_and_one_kernel():
    cell = nn.LSTMCell(WIDTH, WIDTH, device="meta")
    traced = trace(lambda x: cell(x)[0], ROWS, WIDTH)
    assert ops(traced, "forward") == ["zeros", "mm", "mm", "_thnn_fused_lstm_cell"]
    assert ops(traced, "backward")[0] == "_thnn_fused_lstm_cell_backward_impl"


def test_a_cell_of_a_gru_is_two_products_and_one_kernel():
    cell = nn.GRUCell(WIDTH, WIDTH, device="meta")
    traced = trace(Call(cell, cell), ROWS, WIDTH)
    assert ops(traced, "forward") == ["zeros", "mm", "mm", "_thnn_fused_gru_cell"]
    assert ops(traced, "backward")[:3] == ["_thnn_fused_gru_cell_backward", "sum", "sum"]
    # The state before, which the product of its weight needs again, and the workspace.
    assert kept_bytes(traced) == ROWS * (1 + 5) * WIDTH * 4


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_cells_give_the_shapes_of_pytorch(kind, bias):
    cell = kind(WIDTH, 2 * WIDTH, bias=bias)
    expected = cell(torch.ones(ROWS, WIDTH))
    with accelerator_kernels():
        found = cell.to("meta")(torch.ones(ROWS, WIDTH, device="meta"))
    assert [state.shape for state in tensors_of([found])] == [state.shape for state in tensors_of([expected])]
    sum(state.sum() for state in tensors_of([found])).backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in cell.parameters())
