"""Whole commands in fresh processes: one measured cell, and a rehearsal of the session on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections import Counter
from functools import partial

from gpipe_bench.components import PUBLISHED
from gpipe_bench.figures.tables import read_rows
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.results.rows import Row
from gpipe_bench.suite.cell_files import cells_text
from gpipe_bench.suite.cells import MeasuredCell
from gpipe_bench.suite.storage.raw import RawResult
from tests.project.tree import ROOT
from tests.suite.cells_of import cell, in_file


def gpipe_bench(*arguments):
    command = [sys.executable, "-m", "gpipe_bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_one_cell(tmp_path):
    made, out = cell(variant="x-x-ptl"), tmp_path / "raw" / "a.json"
    done = gpipe_bench("run", *in_file(tmp_path, made), "--repeat", 1, "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok: paper's executor, x-x-ptl repeat 1: ")
    result = RawResult.read(out)
    assert (result.cell, result.row.status, result.row.repeat) == (made.id, "ok", 1)
    assert (len(result.steps), len(result.devices)) == (2, 2)
    assert result.row.throughput_samples_per_s > 0
    assert [path.name for path in out.parent.iterdir()] == ["a.json"]


def test_a_rehearsed_session(tmp_path):
    """The script that ``make gpu`` calls, on the CPU, with cells of seconds."""
    out, cells = tmp_path / "gpu", tmp_path / "cells.json"
    small = {"model_args": "depth=2;B=1;C=4;size=16", "batch_size": 4, "chunks": 2, "balance": "14-15", "steps": 2}
    cells.write_text(cells_text(MeasuredCell(variant=name, **small) for name in (*PUBLISHED, "x-x-ptl")))
    race = "--preset quick --settings {contenders:[engine-scheduled]}"
    env = {**os.environ, "PYTHON": sys.executable, "DEVICE": "cpu", "CELLS": str(cells), "RACE": race}
    call = partial(subprocess.run, [str(ROOT / "scripts" / "gpu_session.sh"), str(out)], capture_output=True, text=True)
    done = call(env=env, check=False)
    assert done.returncode == 0, done.stderr
    for line in ("device profile: done", "race of peers: done"):
        assert line in done.stderr
    for word in ("baseline", "dep-x-x", "copy_streams needs an accelerator"):
        assert word in done.stdout
    rows = read_rows(out / "ablation.csv", Row.columns())
    assert Counter((row.variant, row.status) for row in rows) == {
        ("baseline", "ok"): 4,
        ("dep-x-x", "ok"): 4,
        ("dep-str-x", "unsupported"): 1,
        ("dep-str-ptl", "unsupported"): 1,
        ("x-x-ptl", "ok"): 2,
    }
    assert load_profile(out / "profile.yaml").kernels
    assert "torch==" in (out / "packages.txt").read_text()
    assert len([path for path in out.rglob("*") if path.is_file()]) == 8
    with tarfile.open(out / "bundle.tar.gz") as archive:
        names = archive.getnames()
    packed = ("ablation.csv", "ablation_events.csv", "traces/baseline.json", "race/peers.csv", "raw/published.json")
    assert {f"gpu/{name}" for name in packed} <= set(names)
    again = call(env=env, check=False)
    assert (again.returncode, "folder must be empty" in again.stderr) == (2, True)


def test_a_session_without_a_gpu_leaves_nothing(tmp_path):
    env = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = [str(ROOT / "scripts" / "gpu_session.sh"), str(tmp_path / "gpu")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: device cuda must have a GPU")
    assert not (tmp_path / "gpu").exists()
