"""A measured run: same weights everywhere, a plain SGD step, and every column of the row."""

from __future__ import annotations

import math

import pytest
import torch

from gpipe_bench.errors import BalanceError, DeviceCountError
from gpipe_bench.models.table import MODELS, parse_arguments
from gpipe_bench.results.rows import Row
from gpipe_bench.results.timeline import COPY_KINDS
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.suite.running.measured import measure_cell
from gpipe_bench.suite.running.run import finished
from gpipe_bench.suite.running.trial import Trial, prepare_process
from gpipe_bench.suite.storage.raw import DEVICE_COLUMNS, STEP_COLUMNS
from tests.suite.cells_of import cell

# What has no value on a CPU: an allocator that reserves, versions of CUDA and of a driver, clocks of other processes,
# and the experiment, which collect writes.
EMPTY_ON_CPU = {"flavour", "source", "peak_reserved_gib", "cuda", "driver", "experiment", "reason", "clock_error_us"}
# Made where the rows of a table are together.
OF_A_TABLE = {"run_as", "autograd", "sweep_kind"}
OF_VIRTUAL_TIME = {"steps_overlap"}
# Unknown outside a git checkout.
OF_GIT = {"commit", "dirty"}
FOUR = {"partitions": 4, "balance": "7-7-7-8", "schedule": "gpipe"}
SCHEDULED = [{**FOUR, "schedule": name} for name in SCHEDULES]


@pytest.fixture(scope="module")
def result():
    return finished(measure_cell(cell(variant="dep-x-ptl"), 3))


def test_every_column_of_the_row_is_filled(result):
    row = result.row.to_dict()
    empty = {name for name, value in row.items() if value in (None, "")}
    assert empty - OF_GIT - OF_A_TABLE - OF_VIRTUAL_TIME <= EMPTY_ON_CPU
    assert (row["status"], row["repeat"], row["device_count"], row["microbatches"]) == ("ok", 3, 1, 2)
    assert row["device"].startswith("cpu ")
    assert row["config_sha256"] == cell(variant="dep-x-ptl").config_sha256


def test_throughput_is_the_batch_over_the_median_step(result):
    times = [step["step_time_ms"] for step in result.steps]
    assert [tuple(step) for step in result.steps] == [STEP_COLUMNS] * 2
    assert result.row.step_time_ms == pytest.approx(sum(times) / 2)
    assert result.row.throughput_samples_per_s == pytest.approx(4e3 / result.row.step_time_ms)
    for step in result.steps:
        assert step["throughput_samples_per_s"] == pytest.approx(4e3 / step["step_time_ms"])


def test_shares_of_each_partition_and_of_the_row(result):
    shares = ["compute_fraction", "recompute_fraction", "copy_fraction", "imbalance_fraction", "bubble_fraction"]
    assert [tuple(record) for record in result.devices] == [DEVICE_COLUMNS] * 2
    for record in result.devices:
        assert math.fsum(record[name] for name in shares) == pytest.approx(1)
        assert record["utilization_fraction"] == pytest.approx(
            record["compute_fraction"] + record["recompute_fraction"]
        )
    for name in (
        "bubble_fraction",
        "copy_fraction",
        "recompute_fraction",
        "imbalance_fraction",
        "utilization_fraction",
    ):
        mean = math.fsum(record[name] for record in result.devices) / 2
        assert getattr(result.row, name) == pytest.approx(mean)
    assert [record["layers"] for record in result.devices] == [14, 15]


def test_a_line_per_partition_with_its_device(result):
    assert [(record["partition"], record["device_index"]) for record in result.devices] == [(0, 0), (1, 0)]


def test_memory_is_the_sum_over_partitions(result):
    peaks = [record["peak_allocated_gib"] for record in result.devices]
    assert result.row.peak_allocated_gib == pytest.approx(sum(peaks))
    parameters = [Trial(cell()).pipe.partitions[j].parameters() for j in range(2)]
    for peak, group in zip(peaks, parameters, strict=True):
        # Parameters and their gradients at least.
        assert peak * 2**30 > 2 * sum(4 * parameter.numel() for parameter in group)


def test_events_are_those_of_one_step(result):
    """Micro-batch 0 is checkpointed, the last one is not; both skips of the model hop through a portal."""
    kinds = [(event["kind"], event["microbatch"], event["partition"]) for event in result.events]
    once = [kind for kind in kinds if kind[0] not in ("portal", "portal_grad")]
    expected = {(kind, i, j) for kind in ("forward", "backward") for i in range(2) for j in range(2)}
    expected |= {("recompute", 0, 0), ("recompute", 0, 1)}
    expected |= {(kind, i, 1) for kind in ("copy", "copy_grad") for i in range(2)}
    assert sorted(once) == sorted(expected)
    assert {kind for kind in kinds if kind[0] == "portal"} == {("portal", 0, 1), ("portal", 1, 1)}
    assert all(event["bytes"] > 0 for event in result.events if event["kind"] in COPY_KINDS)


def test_partitions_on_one_device_of_a_schedule_share_its_time():
    """Partitions 0 and 3 are on device 0, partitions 1 and 2 on device 1."""
    result = finished(measure_cell(cell(variant="dep-x-ptl", **{**FOUR, "schedule": "zb_v"}), 0))
    shares = ["compute_fraction", "recompute_fraction", "copy_fraction", "imbalance_fraction", "bubble_fraction"]
    split = [tuple(record[name] for name in shares) for record in result.devices]
    assert (split[0], split[1]) == (split[3], split[2])
    assert math.fsum(split[0]) == pytest.approx(1)
    assert result.row.bubble_fraction == pytest.approx((split[0][-1] + split[1][-1]) / 2)
    assert {event["kind"] for event in result.events} >= {"forward", "backward_inputs", "backward_weights"}


def test_weights_and_batch_depend_on_the_seed_alone():
    first, again, other = Trial(cell()), Trial(cell(variant="baseline", chunks=1)), Trial(cell(seed=1))
    parameters = [torch.cat([p.detach().flatten() for p in trial.pipe.parameters()]) for trial in (first, again, other)]
    assert torch.equal(parameters[0], parameters[1])
    assert not torch.equal(parameters[0], parameters[2])


@pytest.mark.parametrize("settings", [{}, *SCHEDULED], ids=lambda settings: settings.get("schedule", "autograd"))
def test_a_step_is_one_of_plain_sgd(settings):
    made = cell(model_args="depth=2;B=1;C=4;size=16;dropout=0", **settings)
    arguments = parse_arguments(made.model, made.model_args)
    spec = MODELS[made.model]
    torch.manual_seed(made.seed)
    plain = spec.build(**arguments)
    batch, target = spec.make_batch(made.batch_size, arguments, torch.Generator().manual_seed(made.seed))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trial = Trial(made)
    for _ in range(2):
        optimizer.zero_grad()
        spec.loss(plain(batch), target).backward()
        optimizer.step()
        trial.step()
    found = trial.pipe.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value)


def test_what_pytorch_keeps_per_process_is_set():
    torch.set_num_threads(2)
    torch.backends.cudnn.benchmark = True
    prepare_process(cell(threads=1, tf32=True))
    assert torch.get_num_threads() == 1
    assert not torch.backends.cudnn.benchmark
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32
    prepare_process(cell())
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


def test_more_devices_than_the_machine_has():
    with pytest.raises(DeviceCountError, match=r"devices must be at most the \d+ cuda devices .* got 999"):
        Trial(cell(device="cuda", devices=999))


def test_a_balance_that_does_not_fit_is_an_error_of_arguments():
    with pytest.raises(BalanceError):
        Trial(cell(balance="14-14"))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["baseline", "dep-str-ptl"])
def test_a_cell_on_one_gpu(variant):
    result = finished(measure_cell(cell(variant=variant, device="cuda"), 0))
    row: Row = result.row
    assert row.status == "ok"
    assert row.device.startswith("cuda ")
    assert (row.device_count, row.transfer) == (1, "host")
    assert row.peak_reserved_gib is not None
    assert row.peak_allocated_gib is not None
    assert row.peak_reserved_gib >= row.peak_allocated_gib > 0
    assert row.utilization_fraction is not None
    assert 0 <= row.utilization_fraction <= 1
    # Both partitions share the device: its peaks stand with the first.
    assert [record["peak_reserved_gib"] is None for record in result.devices] == [False, True]
    assert {event["device"] for event in result.events} == {"cuda:0"}
    assert all(event["end_us"] >= event["start_us"] for event in result.events)
    streams = {event["stream"] for event in result.events if event["kind"] in COPY_KINDS}
    assert streams == ({"copy"} if variant == "dep-str-ptl" else {"compute"})


@pytest.mark.multigpu
def test_a_cell_on_two_gpus():
    result = finished(measure_cell(cell(variant="dep-str-ptl", device="cuda", devices=2, transfer="direct"), 0))
    assert result.row.device_count == 2
    assert [record["device"] for record in result.devices] == ["cuda:0", "cuda:1"]
    assert all(record["peak_reserved_gib"] > 0 for record in result.devices)
