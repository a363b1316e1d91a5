"""The race on GPUs: who cannot run says so."""

from __future__ import annotations

import pandas as pd
import pytest

from gpipe_bench.suite.machine import find_machine
from studies.peers.contenders import contenders_of
from studies.peers.race import run_race
from studies.peers.settings import read_settings
from studies.peers.table import write_race

pytestmark = pytest.mark.gpu
ENGINES = ["engine-autograd", "engine-scheduled", "engine-1f1b", "engine-interleaved", "engine-zb-h1"]


def test_the_race_on_accelerators(accelerators, tmp_path):
    if accelerators[0].type != "cuda":
        pytest.skip("the race knows cpu and cuda")
    names = [*ENGINES, "pipelining-gpipe", "pipelining-interleaved", "plain", "loop"]
    cases = read_settings({"contenders": names}, "quick").cases(find_machine("cuda"))
    facts, raced = run_race(cases, contenders_of(names), timeout_s=60, balance_s=0.1, report=print)
    write_race(raced, facts, 1e-9, tmp_path / "peers.csv", "{}")
    for row in pd.read_csv(tmp_path / "peers.csv", keep_default_na=False).to_dict("records"):
        if row["contender"].startswith("pipelining") and len(accelerators) < 2:
            assert row["status"] == "unsupported"
            assert "NCCL" in row["reason"]
        else:
            assert row["status"] == "ok", row["reason"]
            assert row["gradients"] == "equal"
            assert row["device"].startswith("cuda")
