"""What is on disk is neither put together nor traced again, and needs neither PyTorch nor what reads profiles."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from gpipe_bench.simulator.hardware.profile import load_profile
from gpipe_bench.simulator.predictions import predictions
from gpipe_bench.simulator.tracing import trace_cache
from gpipe_bench.simulator.workloads.build import Model, build_workload
from gpipe_bench.simulator.workloads.stored import kept_workload
from gpipe_bench.simulator.workloads.workload import TaskWork, Workload

ARGUMENTS = {"depth": 2, "B": 1, "C": 4, "size": 16}


def without_requests(work: Workload) -> Workload:
    def bare(task: TaskWork) -> TaskWork:
        none = dict.fromkeys(("forward_memory", "graph_memory", "backward_memory"), ())
        return replace(task, **none, checkpointed=task.checkpointed and bare(task.checkpointed))

    parts = ({size: bare(task) for size, task in sizes.items()} for sizes in work.partitions)
    return replace(work, partitions=tuple(parts))


@pytest.fixture(scope="module")
def workload(tmp_path_factory) -> Workload:
    """With skips across boundaries, checkpoints with a work of their own, two sizes of micro-batches, an optimizer."""
    return build_workload(
        Model("unet", ARGUMENTS),
        balance=[10, 10, 9],
        batch_size=11,
        chunks=4,
        profile=load_profile("p40"),
        optimizer="adam",
        cache=tmp_path_factory.mktemp("traces"),
    )


def test_a_stored_workload_is_the_same(workload, tmp_path):
    assert workload.skips
    assert len(workload.partitions[0]) == 2
    assert any(task.checkpointed for sizes in workload.partitions for task in sizes.values())
    made = []

    def make():
        made.append(workload)
        return workload

    first, second = (kept_workload(tmp_path, {"name": "one"}, make) for _ in range(2))
    assert first is workload
    assert second == workload
    assert second is not workload
    assert len(made) == 1


def test_a_workload_for_times_alone_lacks_its_requests_for_memory(workload, tmp_path):
    kept_workload(tmp_path, {}, lambda: workload)
    max(tmp_path.iterdir(), key=lambda path: path.stat().st_size).unlink()
    bare = kept_workload(tmp_path, {}, lambda: pytest.fail("it is there"), memory=False)
    assert bare == without_requests(workload)
    assert kept_workload(tmp_path, {}, lambda: workload) is workload
    assert kept_workload(tmp_path, {}, lambda: pytest.fail("it is there again")) == workload


@pytest.mark.parametrize("text", ["", "[[]]", '{"partitions": 1}'])
def test_a_workload_whose_file_was_damaged_is_made_anew(workload, tmp_path, text):
    kept_workload(tmp_path, {}, lambda: workload)
    for path in sorted(tmp_path.iterdir()):
        path.write_text(text, encoding="utf-8")
        assert kept_workload(tmp_path, {}, lambda: workload) is workload
        assert kept_workload(tmp_path, {}, lambda: pytest.fail("it is there again")) == workload


def test_another_key_is_another_workload(workload, tmp_path):
    other = Workload(workload.partitions[:1], workload.microbatch_sizes)
    kept_workload(tmp_path, {"name": "one"}, lambda: workload)
    assert kept_workload(tmp_path, {"name": "other"}, lambda: other) == other


def test_predictions_from_disk_load_neither_pytorch_nor_what_checks_profiles(tmp_path):
    list(predictions(["resnet101-speed"], tmp_path))
    program = (
        "import sys; from pathlib import Path; from gpipe_bench.simulator.predictions import predictions; "
        "rows = list(predictions(['resnet101-speed'], Path(sys.argv[1]))); "
        "print(len(rows), sorted({'torch', 'numpy', 'scipy', 'pydantic', 'yaml'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["2", "[]\n"]


@pytest.mark.parametrize("flavour", ["published", "current"])
def test_a_run_loads_no_numpy(flavour):
    """A run of 1024 tasks, on a machine that is asked for nothing but the time of copies."""
    program = (
        "import sys; from types import SimpleNamespace; from gpipe_bench.simulator.runs.events import Settings, run; "
        "from gpipe_bench.simulator.workloads.workload import Kernels, TaskWork, Workload; "
        "task = TaskWork(*[Kernels(9000, 1)] * 3, input_bytes=(1,), output_bytes=(1,)); "
        "machine = SimpleNamespace(launch_ns=0, queue_depth=0, capacity_bytes=0, "
        "copy_ns=lambda *_: 1000, bus=lambda *_: None); "
        "run(Workload(({1: task},) * 2, (1,) * 512), machine, Settings(flavour=sys.argv[1], memory=False)); "
        "print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, flavour], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_what_another_version_of_pytorch_or_of_this_code_stored_is_not_read(workload, tmp_path, monkeypatch):
    def stored() -> bool:
        made = []
        kept_workload(tmp_path, {}, lambda: made.append(workload) or workload)
        return not made

    assert [stored(), stored()] == [False, True]
    monkeypatch.setattr(trace_cache, "_torch_version", lambda: "0.1")
    assert [stored(), stored()] == [False, True]
    monkeypatch.setattr(trace_cache, "_digest", lambda _: "other sources")
    assert [stored(), stored()] == [False, True]


def test_the_version_of_pytorch_is_read_without_loading_it():
    assert repr(torch.__version__) in trace_cache._torch_version()
