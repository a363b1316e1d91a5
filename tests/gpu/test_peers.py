"""The race on GPUs: the same command; who cannot run says so."""

from __future__ import annotations

import csv
import json

import pytest
from typer.testing import CliRunner

from gpipe_bench.cli.app import application

pytestmark = pytest.mark.gpu


def test_the_race_on_accelerators(accelerators, tmp_path):
    if accelerators[0].type != "cuda":
        pytest.skip("the race knows cpu and cuda")
    engines = ["engine-autograd", "engine-scheduled", "engine-1f1b", "engine-interleaved", "engine-zb-h1"]
    names = json.dumps([*engines, "pipelining-gpipe", "pipelining-interleaved", "plain", "loop"])
    out = tmp_path / "peers.csv"
    words = ["peers", "run", "--quick", "--device", "cuda", "--set", f"contenders={names}", "--out", str(out)]
    done = CliRunner().invoke(application(), words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["contender"].startswith("pipelining") and len(accelerators) < 2:
            assert row["status"] == "unsupported"
            assert "NCCL" in row["reason"]
        else:
            assert row["status"] == "ok", row["reason"]
            assert row["gradients"] == "equal"
            # Of combinations no memory is counted: all components on need what the case of tiny layers says.
            assert row["workload"] == "combinations" or float(row["peak_live_mib"]) > 0
            assert row["device"].startswith("cuda")
