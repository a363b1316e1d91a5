"""Whatever happens to a cell, a row comes back; wrong arguments are no result."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gpipe_bench.errors import BalanceError, ConfigError, DeviceCountError, SkipLayoutError, UnsupportedError
from gpipe_bench.measure.environment import environment_facts
from gpipe_bench.suite.running.run import failed_result, run_cell
from tests.suite.cells_of import cell, ok_result


def raising(error):
    def measure(cell, repeat):
        raise error

    return measure


def wrapped(error):
    outer = RuntimeError("partition 1 failed")
    outer.__cause__ = error
    return outer


def real_allocation_failure():
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom", "OutOfMemoryError: CUDA out of"),
        (MemoryError(), "oom", "MemoryError"),
        (real_allocation_failure(), "oom", "RuntimeError: "),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "oom", "RuntimeError: cuDNN error"),
        (wrapped(MemoryError("no room")), "oom", "RuntimeError: partition 1 failed"),
        (UnsupportedError("backward scheduled needs more"), "unsupported", "backward scheduled needs more"),
        (RuntimeError("size mismatch"), "error", "RuntimeError: size mismatch"),
        (SkipLayoutError("two\nlines"), "error", "SkipLayoutError: two lines"),
        (ValueError("x" * 1000), "error", "ValueError: xxx"),
    ],
)
def test_a_failure_is_a_row_with_status_and_reason(error, status, reason):
    result = run_cell(cell(), 3, raising(error))
    row = result.row
    assert (row.status, row.repeat, row.variant) == (status, 3, "dep-x-ptl")
    assert row.reason.startswith(reason)
    assert "\n" not in row.reason
    assert len(row.reason) < 400
    assert row.throughput_samples_per_s is None
    assert (result.cell, result.steps, result.events) == (cell().id, [], [])


def test_an_unexpected_failure_shows_its_traceback(capsys):
    run_cell(cell(), 0, raising(RuntimeError("size mismatch")))
    assert "Traceback" in capsys.readouterr().err
    run_cell(cell(), 0, raising(MemoryError()))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [ConfigError(["x"]), BalanceError("x"), KeyboardInterrupt()])
def test_wrong_arguments_and_interrupts_are_no_result(error):
    with pytest.raises(type(error)):
        run_cell(cell(), 0, raising(error))


def test_fewer_devices_than_the_cell_needs_are_a_row_without_a_number():
    result = run_cell(cell(), 1, raising(DeviceCountError("devices must be at most the 1 cuda devices, got 2")))
    assert (result.row.status, result.row.repeat) == ("skipped", 1)
    assert result.row.reason == "DeviceCountError: devices must be at most the 1 cuda devices, got 2"
    assert result.row.throughput_samples_per_s is None


def test_a_cell_for_gpus_refuses_where_there_are_too_few():
    row = run_cell(cell(device="cuda", devices=2, transfer="direct"), 0).row
    if row.status == "ok":
        pytest.skip("this machine has two GPUs")
    assert row.status == "skipped"
    assert "got 2" in row.reason


def test_a_finished_run_is_handed_on():
    result = ok_result()

    def measure(cell, repeat):
        yield
        return result

    assert run_cell(cell(), 0, measure) is result


def test_an_unsupported_cell_is_never_measured():
    row = run_cell(cell(variant="dep-str-ptl"), 0, raising(AssertionError("measured"))).row
    assert (row.status, row.copy_streams) == ("unsupported", True)
    assert row.reason == "copy_streams needs an accelerator; on cpu it changes nothing, see variant dep-x-ptl"


def test_a_failed_row_says_what_was_asked_for():
    row = failed_result(cell(variant="x-x-ptl-x-rec"), 2, "skipped", "no time").row
    made = cell(variant="x-x-ptl-x-rec")
    flags = (row.clock_cycle, row.fork_join, row.copy_streams, row.portals, row.early_recompute)
    assert flags == (False, False, False, True, True)
    assert (row.model, row.model_args) == ("unet", "depth=2;B=1;C=4;size=16;in=3;out=1;dropout=0.1")
    assert (row.partitions, row.chunks, row.microbatches, row.batch_size, row.balance) == (2, 2, 2, 4, "14-15")
    assert (row.transfer, row.backward, row.checkpoint, row.seed) == ("host", "autograd", "except_last", 0)
    assert (row.config_sha256, row.evidence, row.experiment) == (made.config_sha256, "measured", "")
    facts = environment_facts(["cpu"])
    named = ("device", "device_count", "profile", "torch", "driver", "python", "commit", "dirty")
    assert [getattr(row, name) for name in named] == [facts[name] for name in named]
    assert row.started_utc.endswith("+00:00")


def test_an_unsupported_cell_needs_no_torch():
    program = """
import sys
sys.modules["torch"] = None
from gpipe_bench.suite.cells import MeasuredCell
from gpipe_bench.suite.running.run import run_cell
row = run_cell(MeasuredCell(variant="dep-str-x"), 0).row
print(row.status, row.profile, row.commit)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    facts = environment_facts(["cpu"])
    assert done.stdout == f"unsupported {facts['profile']} {facts['commit']}\n", done.stderr
