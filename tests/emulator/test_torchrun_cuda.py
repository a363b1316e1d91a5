"""``torch.cuda`` in an emulated script: each public name is replaced, refused, or known to be harmless."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpipe_bench.emulator.build import obstacle
from tests.processes import command

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

# Errors, and tables of their names.
HARMLESS = ["CudaError", "DeferredCudaCallError", "check_error", "cudaStatus"]

SCRIPT = """
import json, torch
import torch.distributed as dist
dist.init_process_group("nccl")
assert dist.is_nccl_available()
torch.cuda.set_device(dist.get_rank())
kept = torch.zeros(1024, device="cuda")
free, total = torch.cuda.mem_get_info()
used = torch.cuda.memory_stats()["allocated_bytes.all.current"]
assert total - free == used == torch.cuda.memory.memory_allocated() == 4096
assert len(torch.cuda.get_rng_state_all()) == torch.cuda.device_count()
torch.cuda.nvtx.range_push("step")
cuda = torch.cuda
for refused in (cuda.memory_summary, cuda.graphs.CUDAGraph, cuda.memory_usage, cuda.nccl.all_reduce):
    try:
        refused()
    except Exception as error:
        assert "must be one that virtual devices have, got torch.cuda." in str(error), error
    else:
        raise AssertionError(refused)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
    torch.ones(2)
assert any(event.key == "aten::ones" for event in profiled.key_averages())
values = {name: getattr(torch.cuda, name) for name in dir(torch.cuda) if not name.startswith("_")}
left = [name for name, value in values.items() if str(getattr(value, "__module__", "")).startswith("torch.cuda")]
if dist.get_rank() == 0:
    print("left", json.dumps(left))
"""


def test_no_function_of_cuda_is_that_of_a_machine_without_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    shown = command(["emulate", "--nproc", 2, script], ROOT)
    assert shown.returncode == 0, shown.stderr
    assert "PyTorch's profiler sees no virtual device" in shown.stderr
    left = next(line for line in shown.stdout.splitlines() if line.startswith("left "))
    assert json.loads(left.removeprefix("left ")) == HARMLESS
