"""The emulator in one call, beside the simulator: in a process of its own, whose devices compute nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_bench.emulator import emulate
from gpipe_bench.emulator.build import obstacle
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.timeline import COMPUTE_KINDS, COPY_KINDS
from gpipe_bench.simulator import Model

ROOT = Path(__file__).resolve().parents[2]
REASON = obstacle()
PROGRAM = """
import json
import torch
from torch import nn
from gpipe_bench.components import Components
from gpipe_bench.emulator import emulate, prepare
from gpipe_bench.emulator.library import leave
from gpipe_bench.simulator import Model, simulate

prepare("p40")
model = Model("unet", {"depth": 2, "B": 1, "C": 8, "size": 32})
found = []
for given in CASES:
    label, model_args, rest = given
    own = {**dict(balance=[14, 15], batch_size=8, chunks=4, components=Components.from_label(label)), **rest}
    one = Model("unet", {**model.arguments, **model_args})
    run, twin = emulate(one, steps=3, **own), simulate(one, **own)
    found.append({
        "row": run.row().to_dict(), "steps": [step.step_time_ms for step in run.each],
        "simulated_ms": twin.step_time_ms,
        "host": [run.host_fraction, twin.host_fraction],
        "events": [event.to_dict() for event in run.events], "devices": len(run.devices),
        "status": run.status, "reason": run.reason,
    })

class Frugal(nn.Module):
    # Goes without its extra memory where there is none, as some libraries do.
    def forward(self, x):
        try:
            return x + torch.empty(2**35, dtype=torch.uint8, device=x.device)[0]
        except torch.OutOfMemoryError:
            return x + 1

layers = nn.Sequential(nn.Linear(8, 8), Frugal(), nn.Linear(8, 8))
own = [[("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0)], [("F", 0, 1), ("B", 0, 1), ("F", 1, 1), ("B", 1, 1)]]
given = dict(balance=[14, 15], batch_size=8, chunks=2, profile="p40")
lists = [emulate(model, **given, schedule=schedule) for schedule in (own, "1f1b")]
frugal = emulate(layers, balance=[1, 2], batch_size=8, chunks=2, sample=torch.ones(1, 8), profile="p40")
peaks = []
for tied in (False, True):
    words = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.Linear(64, 1000, bias=False))
    if tied:
        words[2].weight = words[0].weight
    given = dict(balance=[1, 1, 1], batch_size=8, chunks=2, sample=torch.ones(1, dtype=torch.long), profile="p40",
                 schedule="1f1b", optimizer="adam")
    peaks.append([run(words, **given).devices[-1].peak_allocated_gib * 2**30 for run in (emulate, simulate)])
print(json.dumps([*found, [[run.step_time_ms, run.settings["schedule"]] for run in lists], frugal.status, peaks]))
leave(0)
"""
CASES = [
    ["dep-str-ptl", {}, {}],
    ["dep-str-ptl", {}, {"checkpoint": "never", "optimizer": "adam"}],
    ["dep-str-ptl", {}, {"schedule": "1f1b"}],
    ["dep-str-ptl", {"C": 256, "size": 256}, {"batch_size": 256}],
]


@pytest.fixture(scope="module")
def found():
    program = PROGRAM.replace("CASES", repr(CASES))
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(300)]


@pytest.mark.parametrize("case", range(3))
def test_a_step_takes_as_long_as_the_simulator_says(found, case):
    one = found[case]
    assert one["status"] == "ok"
    assert len(one["steps"]) == 2
    assert one["steps"] == pytest.approx([one["simulated_ms"]] * 2, rel=0.05)


@pytest.mark.parametrize("case", range(3))
def test_the_host_launches_as_long_as_the_simulator_says(found, case):
    emulated, simulated = found[case]["host"]
    assert emulated == pytest.approx(simulated, rel=0.08)


def test_the_row_says_what_was_emulated_on_what(found):
    row = found[0]["row"]
    assert (row["evidence"], row["profile"], row["variant"], row["balance"]) == (
        "emulated",
        "p40",
        "dep-str-ptl",
        "14-15",
    )
    assert (row["partitions"], row["chunks"], row["batch_size"], row["microbatches"]) == (2, 4, 8, 4)
    assert row["throughput_samples_per_s"] == pytest.approx(8 / row["step_time_ms"] * 1e3)
    assert row["peak_reserved_gib"] >= row["peak_allocated_gib"] > 0
    shares = ("bubble_fraction", "copy_fraction", "recompute_fraction", "imbalance_fraction")
    assert 0 < sum(row[name] for name in shares) < 1


def test_every_task_of_the_step_is_an_event(found):
    events = found[0]["events"]
    forward = {(event["microbatch"], event["partition"]) for event in events if event["kind"] == "forward"}
    assert forward == {(i, j) for i in range(4) for j in range(2)}
    kinds = {event["kind"] for event in events}
    assert {"forward", "recompute", "backward", "copy", "copy_grad", "portal"} <= kinds <= {*COMPUTE_KINDS, *COPY_KINDS}
    assert all(event["issue_us"] <= event["end_us"] and event["start_us"] <= event["end_us"] for event in events)


def test_what_does_not_fit_says_how_much_it_needs(found):
    assert found[3]["status"] == "oom"
    assert "GiB and has 22.0 GiB" in found[3]["reason"]


def test_a_list_of_actions_is_emulated_as_the_schedule_of_that_name(found):
    (own_ms, own), (named_ms, name) = found[4]
    assert (own, name) == ("own", "1f1b")
    assert own_ms == named_ms


def test_a_tied_weight_has_no_state_of_the_optimizer_where_its_copy_is(found):
    untied, tied = found[-1]
    assert [one - other for one, other in zip(untied, tied, strict=True)] == [2 * 4 * 1000 * 64] * 2


def test_a_layer_can_catch_a_full_device_amid_the_step(found):
    assert found[5] == "ok"


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"devices": [0, 1, 2]}, "devices must have a number for each of the 2 devices of the schedule, got 0"),
        (
            {"devices": [0, 1], "schedule": "zb_v"},
            "for each of the 1 devices of the schedule, got 0, 1",
        ),
        ({"devices": [0, 16]}, "devices must be numbers below 16, got 16; number them from 0 on"),
        ({"checkpoint": "some"}, "checkpoint must be one of always, except_last, never, got 'some'"),
        ({"steps": 1, "chunks": 0}, "steps must be a whole number of at least 2, got 1"),
        ({"launch_us": 0}, "launch_us must be more than 0 and at most 1000000, got 0; use microseconds"),
        ({"host_time": "no"}, "host_time must be True or False, got 'no'"),
        ({"steps": None}, "steps must be a whole number of at least 2, got None"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(wrong, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        emulate(Model("unet", {}), **{"balance": [120, 121], "batch_size": 4, **wrong})
