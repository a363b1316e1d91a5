"""Devices that compute nothing: memory, numbers, refusals, and functions that are one kernel."""

from __future__ import annotations

import resource
import warnings

import pytest
import torch
from torch import nn

from gpipe_bench import GPipe
from gpipe_bench.emulator.handovers import seen
from gpipe_bench.emulator.library import devices, load
from gpipe_bench.emulator.recording import recording

FIRST, SECOND = devices(2)
GIB = 2**30


def names(trace):
    return [record.name for record in trace.of("kernel")]


def test_memory_reads_as_zeros_and_takes_no_room():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = torch.ones(1024, 1024, 1024, device=FIRST)
    assert torch.accelerator.memory_allocated(FIRST) == 4 * GIB
    y = x * 2 + 1
    assert y[0, 0, :3].cpu().tolist() == [0, 0, 0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024
    del x, y
    assert torch.accelerator.memory_allocated(FIRST) == 0


def test_a_device_holds_what_its_profile_says():
    with recording() as trace, pytest.raises(torch.OutOfMemoryError, match="virtual device 0 out of memory"):
        torch.empty(23 * GIB, dtype=torch.uint8, device=FIRST)
    assert [(record.kind, record.device) for record in trace.records] == [("full", 0)]


@pytest.mark.filterwarnings("ignore:only shapes are emulated")
def test_numbers_are_computed_on_zeros():
    x = torch.ones(3, device=FIRST)
    with recording() as trace:
        assert x.sum().item() == 0.0
        assert torch.equal(x, x)
    assert [record.kind for record in trace.records if record.kind == "sync_stream"] == ["sync_stream"] * 2


def test_copies_move_nothing_and_are_on_record():
    x = torch.ones(3).to(FIRST)
    with recording() as trace:
        y = x.to(SECOND)
        z = y.cpu()
    assert z.tolist() == [0, 0, 0]
    assert [record.name for record in trace.of("copy")] == ["device_to_device", "device_to_host"]


@pytest.mark.parametrize(
    "refused",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.where(x > 0),
    ],
)
def test_results_whose_shape_depends_on_values_are_refused(refused):
    with pytest.raises(NotImplementedError, match=r"shape that does not depend on values .* got aten::\w+; replace"):
        refused(torch.ones(3, device=FIRST))


def test_wrong_shapes_are_an_error_of_the_operator():
    with pytest.raises(RuntimeError, match="reduction dim"):
        torch.ones(2, 3, device=FIRST) @ torch.ones(2, 3, device=FIRST)
    assert (torch.ones(2, 3, device=FIRST) @ torch.ones(3, 2, device=FIRST)).shape == (2, 2)


def test_views_and_writes_in_place_share_memory():
    x = torch.ones(2, 3, device=FIRST)
    with recording() as trace:
        x.t()[1:].add_(1)
        assert x.view(6).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    (kernel,) = trace.of("kernel")
    assert kernel.reads == ()
    assert trace.of("alloc") == []


def test_integers_give_numbers_of_the_type_that_is_the_default_now():
    x = torch.ones(3, dtype=torch.int64, device=devices()[0])
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert (x / x).dtype is dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_result_that_is_resized():
    for _ in range(2):
        out = torch.empty(0, device=FIRST)
        torch.add(torch.ones(5, device=FIRST), 1, out=out)
        assert out.shape == (5,)
        assert out.untyped_storage().nbytes() == 20


@pytest.mark.parametrize(
    ("layer", "kernels"),
    [
        (lambda: nn.LSTM(8, 8), {"recurrence", "recurrence_backward"}),
        (lambda: nn.GRU(8, 8), {"recurrence", "recurrence_backward"}),
        (lambda: nn.RMSNorm(8), {"_fused_rms_norm", "_fused_rms_norm_backward"}),
        (nn.Mish, {"mish", "mish_backward"}),
        (lambda: nn.Dropout(0.5), {"native_dropout", "native_dropout_backward"}),
        (
            lambda: nn.TransformerEncoderLayer(8, 2, 16),
            {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"},
        ),
    ],
)
def test_functions_that_accelerators_run_as_one_kernel(layer, kernels):
    x = torch.ones(5, 3, 8, device=FIRST, requires_grad=True)
    with recording() as trace:
        output = layer().to(FIRST)(x)
        output = output[0] if isinstance(output, tuple) else output
        output.backward(torch.ones_like(output))
    assert kernels <= set(names(trace))


def test_scratch_memory_lives_as_long_as_its_kernel():
    layer, x = nn.Conv2d(4, 4, 3, padding=1, device=FIRST), torch.ones(1, 4, 16, 16, device=FIRST)
    with recording() as trace:
        layer(x)
    assert [record.kind for record in trace.records] == ["alloc", "alloc", "kernel", "free", "free"]
    (kernel,) = trace.of("kernel")
    scratch = trace.records[1].writes
    assert trace.records[3].writes == scratch
    assert set(scratch) < set(kernel.writes)


@pytest.mark.parametrize("count", [2, 16])
def test_the_engine_runs(count):
    pipe = GPipe(nn.Sequential(*(nn.Linear(8, 8) for _ in range(16))), [16 // count] * count, devices=devices(count))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with seen(), recording() as trace:
                pipe(torch.ones(4, 8, device=FIRST)).sum().backward()
    kernels = trace.of("kernel")
    assert {record.device for record in kernels} == set(range(count))
    assert all(record.duration is not None and record.duration > 0 for record in kernels)


def test_asking_what_an_operator_gives_is_no_hand_over_of_the_program():
    x = torch.ones(3, 4, 19, 23, device=FIRST)
    with seen(), recording() as trace:
        nn.functional.conv2d(x, x[:, :, :3, :5])
    assert len(trace.of("kernel")) == 1
    assert trace.of("await") == []


def test_a_process_has_one_kind_of_devices():
    with pytest.raises(ValueError, match="one kind of virtual devices"):
        load(16)
