"""Every kind of verdict has an adapter that gets it; this project's engine gets none that is bad."""

from __future__ import annotations

import csv

import pytest
from torch import nn

from gpipe_bench.judge.behaviours import BEHAVIOURS
from gpipe_bench.judge.protocol import Case, Setup
from gpipe_bench.judge.runner import adapter_of, judge
from gpipe_bench.judge.scripts import hooks_fire
from gpipe_bench.schedules import SCHEDULES
from tests.processes import command

ADAPTER = """
import os
import time
import torch
from gpipe_bench.judge.adapters.plain import Plain, PlainPipe

class Broken(PlainPipe):
    def step(self, x, target, loss):
        if loss.reduction == "sum":
            raise OSError("no sums")
        if x.shape[0] == 10:
            time.sleep(600)
        if x.dtype == torch.float16:
            os._exit(3)
        value = super().step(x, target, loss)
        if callable(loss.reduction):
            self.model[0].linear.weight.grad.mul_(2)
        return value

class Adapter(Plain):
    limits = {"skips": "said on its page", "accumulate/always": "not with checkpoints"}

    def build(self, model, setup):
        return Broken(model, model)

def adapter(schedule):
    return Adapter()
"""


def test_each_verdict_is_found_and_a_hang_is_ended(tmp_path):
    (tmp_path / "mine.py").write_text(ADAPTER)
    wanted = {"chain": "ok", "skips": "limit", "labels": "wrong", "sum": "raises", "uneven": "hangs", "nan": "ok"}
    wanted |= {"float16": "raises", "accumulate": "limit"}
    names = [word for name in wanted for word in ("--only", name)]

    done = command(["judge", "--engine", "mine.py", *names, "--limit-s", "2", "--out", "rows.csv"], tmp_path)

    assert done.returncode == 1, done.stderr
    with (tmp_path / "rows.csv").open() as file:
        rows = {row["behaviour"]: row for row in csv.DictReader(file)}
    assert {name: row["verdict"] for name, row in rows.items()} == wanted
    assert rows["labels"]["setting"] == "n=2 m=2 never"
    assert "grad 0.linear.weight is off" in rows["labels"]["detail"]
    assert "rank 0" in rows["uneven"]["detail"]
    assert rows["accumulate"]["detail"] == "not with checkpoints"
    assert rows["float16"]["detail"].startswith("rank 0 ended with exit status 3")
    assert "again: gpipe-bench judge mine.py --only 'labels' --seed 0" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


@pytest.mark.parametrize(("times", "fine"), [(1, True), (3, False), (4, True), (0, False), (5, False)])
def test_a_hook_fires_once_per_batch_or_per_micro_batch(times, fine):
    case = Case(Setup(2, 4), nn.Sequential, lambda _: None)
    found = hooks_fire(case, {"fired weight": 1}, {"fired weight": times})
    assert found == (None if fine else f"fired weight {times} times for 4 micro-batches")


def bad(engine, names):
    adapter = adapter_of(engine)
    return {name: found for name in names if (found := judge(adapter, name)).kind not in ("ok", "limit")}


@pytest.mark.parametrize("schedule", ["", "1f1b,never", "zb_v"])
def test_nothing_is_reported_of_this_engine(schedule):
    assert not bad(f"gpipe_bench:{schedule}", BEHAVIOURS)


@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("schedule", ["", *SCHEDULES])
def test_every_schedule_has_masks_passes_and_missing_gradients_of_the_plain_module(schedule, workers):
    assert not bad(f"gpipe_bench:{schedule},{workers}", ("masks again", "seeds", "passes", "beside"))


def test_unknown_engines_and_behaviours_are_refused(tmp_path):
    done = command(["judge", "gpip_bench"], tmp_path)
    assert done.returncode == 2
    assert "engine must be one of gpipe_bench" in done.stderr
    assert command(["judge", "plain", "--only", "chian"], tmp_path).returncode == 2
