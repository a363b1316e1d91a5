"""Every schedule that the engine runs can be simulated, and so can one of the user's own."""

from __future__ import annotations

import re

import pytest
from torch import nn

from gpipe_bench.errors import ConfigError, ScheduleError
from gpipe_bench.schedules import SCHEDULES, named_schedule, read_csv, to_csv
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from gpipe_bench.simulator import simulate
from tests.simulator_api.layers import linear, sequence

M, N = 8, 4


def simulated(schedule, partitions=N, **options):
    layers = nn.Sequential(*(linear() for _ in range(partitions)))
    given = {"batch_size": 8 * M, "chunks": M, "sample": sequence(), "checkpoint": "never", "steps": 1, **options}
    return simulate(layers, balance=[1] * partitions, schedule=schedule, **given)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_by_its_name(schedule, checkpoint):
    step = simulated(schedule, checkpoint=checkpoint)
    row = step.row()
    assert (step.status, row.schedule, row.backward) == ("ok", schedule, "scheduled")
    assert row.device_count == (2 if schedule in TWO_PER_DEVICE else N)
    assert len(step.devices) == row.device_count
    kinds = {event.kind for event in step.events}
    split = {"backward_inputs", "backward_weights"}
    assert kinds >= split if named_schedule(schedule, M, N, row.device_count).splits else not kinds & split
    assert ("recompute" in kinds) == (checkpoint == "always")


@pytest.mark.parametrize("devices", [2, 3, 6])
def test_interleaved_partitions_on_as_many_devices_as_are_given(devices):
    """Without devices there are two partitions on each."""
    schedule = named_schedule("interleaved", M, 6, devices)
    named = simulated("interleaved", 6, devices=[j % devices for j in range(6)])
    own = simulated(schedule, 6)
    assert named.row().device_count == own.row().device_count == devices
    assert (named.step_time_ms, named.peak_allocated_gib) == (own.step_time_ms, own.peak_allocated_gib)


@pytest.mark.parametrize("form", [lambda schedule: schedule, lambda schedule: schedule.devices])
def test_one_of_your_own_gives_what_its_name_gives(form):
    own = simulated(form(named_schedule("zb_h1", M, N, N)))
    named = simulated("zb_h1")
    assert own.row().schedule == "own"
    assert (own.step_time_ms, own.peak_allocated_gib) == (named.step_time_ms, named.peak_allocated_gib)


def test_a_file_of_pytorch():
    read = read_csv(to_csv(named_schedule("1f1b", M, N, N)))
    assert simulated(read).step_time_ms == simulated("1f1b").step_time_ms


def test_splitting_the_backward_pass_fills_the_bubble_and_one_f_one_b_saves_memory():
    steps = {name: simulated(name, batch_size=128 * M) for name in ("gpipe", "1f1b", "zb_h1")}
    assert steps["zb_h1"].share.bubble_fraction < 0.8 * steps["1f1b"].share.bubble_fraction
    assert steps["1f1b"].devices[1].peak_live_gib < 0.7 * steps["gpipe"].devices[1].peak_live_gib


def test_devices_of_ones_own():
    step = simulated("1f1b", devices=[3, 2, 1, 0])
    assert [use.device for use in step.devices] == [0, 1, 2, 3]
    assert step.step_time_ms == simulated("1f1b").step_time_ms


@pytest.mark.parametrize(
    ("schedule", "error", "said"),
    [
        (
            named_schedule("1f1b", M + 1, N, N),
            ConfigError,
            "schedule must be for 8 micro-batches and 4 partitions, got",
        ),
        ([[("F", 0, 0), ("B", 0, 0)]], ConfigError, "schedule must be for 8 micro-batches and 4 partitions, got"),
        ([[("B", i, j) for i in range(M)] + [("F", i, j) for i in range(M)] for j in range(N)], ScheduleError, "B"),
        ([[("X", 0, 0)], [("F", 0, 1)]], ScheduleError, r"the kind of an action must be one of .*, got X\(0,0\)"),
        ([[("F", -1, 0)]], ScheduleError, r"must be integers from 0, got F\(-1,0\)"),
        ([], ScheduleError, "a schedule must have an action, got none"),
    ],
)
def test_one_that_does_not_fit_is_refused(schedule, error, said):
    with pytest.raises(error, match=said):
        simulated(schedule)


@pytest.mark.parametrize(
    ("name", "rule"),
    [("zb_v", "two partitions for each device"), ("interleaved", "the same number of partitions for each device")],
)
def test_two_partitions_per_device_need_an_even_number(name, rule):
    with pytest.raises(ScheduleError, match=f"{rule}, got 3 partitions for 2 devices"):
        simulated(name, partitions=3)


@pytest.mark.parametrize(("schedule", "devices"), [("interleaved", [0, 0, 1, 1]), ("zb_v", [0, 1, 0, 1])])
def test_partitions_that_a_schedule_has_on_one_device_must_be_on_one(schedule, devices):
    placement = list(named_schedule(schedule, M, N, 2).placement)
    with pytest.raises(ConfigError, match=re.escape(f"use {placement}")):
        simulated(schedule, devices=devices)
    assert simulated(schedule, devices=placement).status == "ok"
