"""What is on disk is neither put together nor traced again, and needs neither PyTorch nor what reads profiles."""

from __future__ import annotations

import os
import pickle
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gpipe_bench.machine.profile import load_profile
from gpipe_bench.simulator.steps.run import run
from gpipe_bench.simulator.tracing import trace_cache
from gpipe_bench.simulator.tracing.trace_cache import kept
from gpipe_bench.simulator.workloads.build import build_workload
from gpipe_bench.simulator.workloads.workload import Workload
from gpipe_bench.step.request import Model
from gpipe_bench.util.cache import write_sealed

ARGUMENTS = {"depth": 2, "B": 1, "C": 4, "size": 16}


def never() -> Workload:
    raise AssertionError("it is there")


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
    first = kept(tmp_path, {"name": "one"}, lambda: workload)
    second = kept(tmp_path, {"name": "one"}, never)
    assert first is workload
    assert second == workload
    assert second is not workload


@contextmanager
def double():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, double])
def test_the_modes_in_which_a_model_is_traced_first_do_not_matter(tmp_path, mode):
    model = Model("gpt2", {"L": 1, "D": 32, "heads": 2, "vocabulary": 64, "context": 8, "dropout": 0.0})
    options = {"balance": [2, 2], "batch_size": 8, "chunks": 2, "profile": load_profile("p40"), "split": True}
    with mode():
        found = build_workload(model, cache=tmp_path / "one", **options)
    again = build_workload(model, cache=tmp_path / "one", **options)
    assert found == again == build_workload(model, cache=tmp_path / "other", **options)


def test_a_model_of_ones_own_is_traced_anew_when_its_file_has_changed(tmp_path):
    path, options = tmp_path / "own.py", {"balance": [1], "batch_size": 4, "profile": load_profile("p40")}
    text = """
from torch import nn
import torch

def net():
    return nn.Sequential(nn.Linear(8, WIDTH))

def net_batch(batch_size):
    return torch.rand(batch_size, 8), torch.rand(batch_size, WIDTH)
"""
    found = []
    for width in (8, 16, 8):
        path.write_text(text.replace("WIDTH", str(width)))
        found.append(build_workload(Model(f"{path}:net", {}), cache=tmp_path / "traces", **options))
    assert [work.partitions[0][4].output_bytes for work in found] == [(4 * width * 4,) for width in (8, 16, 8)]


def test_nothing_is_stored_without_a_folder(workload):
    assert kept(None, {}, lambda: workload) is workload


@pytest.mark.parametrize(
    "damage", [lambda b: b"", lambda _: b"[[]]", lambda b: b[:-9], lambda b: b[:99] + b"7" + b[100:]]
)
def test_a_workload_whose_file_was_damaged_is_made_anew(workload, tmp_path, damage, capsys):
    kept(tmp_path, {}, lambda: workload)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert kept(tmp_path, {}, lambda: workload) is workload
    assert f"{path} is damaged" in capsys.readouterr().err
    assert kept(tmp_path, {}, never) == workload


@pytest.mark.parametrize("stored", [os.system, subprocess.Popen, run, Path])
def test_a_stored_value_calls_nothing_but_classes_of_the_simulator(tmp_path, stored):
    class Calls:
        def __reduce__(self):
            return stored, ("touch called",)

    kept(tmp_path, {}, lambda: 1)
    (path,) = tmp_path.iterdir()
    write_sealed(path, pickle.dumps(Calls()))
    with pytest.raises(pickle.UnpicklingError, match="classes"):
        kept(tmp_path, {}, never)


def test_another_key_is_another_workload(workload, tmp_path):
    other = Workload(workload.partitions[:1], workload.microbatch_sizes)
    kept(tmp_path, {"name": "one"}, lambda: workload)
    assert kept(tmp_path, {"name": "other"}, lambda: other) == other


def test_what_another_version_of_pytorch_or_of_this_code_stored_is_not_read(workload, tmp_path, monkeypatch):
    def stored() -> bool:
        made = []
        kept(tmp_path, {}, lambda: made.append(workload) or workload)
        return not made

    assert [stored(), stored()] == [False, True]
    monkeypatch.setattr(trace_cache, "_torch_version", lambda: "0.1")
    assert [stored(), stored()] == [False, True]
    monkeypatch.setattr(trace_cache, "_digest", lambda _: "other sources")
    assert [stored(), stored()] == [False, True]
