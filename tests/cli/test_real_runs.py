"""Whole commands in fresh processes: one measured cell, and a rehearsal of the session on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile

import pytest

from gpipe_bench.bench.storage.raw import RawResult
from gpipe_bench.figures.tables import read_rows
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.results.rows import Row
from tests.bench.cells_of import cell, in_file


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


@pytest.mark.slow
def test_a_rehearsed_session(tmp_path):
    out = tmp_path / "gpu"
    options = ("--device", "cpu", "--tiny", "--bundle")
    done = gpipe_bench("gpu", "--out", out, *options)
    assert done.returncode == 0, done.stderr
    for line in ("device profile: done", "race of peers: done", "run 4 of 4"):
        assert line in done.stderr
    for word in ("baseline", "dep-x-x", "copy_streams needs an accelerator", "bundle.tar.gz"):
        assert word in done.stdout

    rows = read_rows(out / "ablation.csv", Row.columns())
    assert [(row.variant, row.status) for row in rows] == [
        ("baseline", "ok"),
        ("dep-x-x", "ok"),
        ("dep-str-x", "unsupported"),
        ("dep-str-ptl", "unsupported"),
    ]
    assert load_profile(out / "profile.yaml").kernels
    assert json.loads((out / "environment.json").read_text())["profile"] == "done"
    assert len([path for path in out.rglob("*") if path.is_file()]) == 8
    with tarfile.open(out / "bundle.tar.gz") as archive:
        names = archive.getnames()
    assert {"gpu/ablation.csv", "gpu/traces/baseline.json", "gpu/profile.yaml", "gpu/race/peers.csv"} <= set(names)
    assert sum(name.startswith("gpu/raw/") and name.endswith("/0.json") for name in names) == 2
