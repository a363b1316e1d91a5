"""Traces of every schedule and of every kind of evidence: Perfetto draws all of their slices."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch

from gpipe_bench import Components, GPipe
from gpipe_bench.figures.tables import read_events
from gpipe_bench.measure.timeline import Recorder
from gpipe_bench.results.timeline import chrome_trace
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from gpipe_bench.simulator import Model, simulate
from tests.cover import cover
from tests.overlaps import partial_overlaps
from tests.project.tree import ROOT

UNET = Model("unet", {"B": 1, "C": 8, "depth": 2, "size": 32})
"""It has 29 layers, and skips between distant ones."""
BALANCES = {2: [14, 15], 4: [7, 7, 7, 8]}
TABLES = sorted((ROOT / "results" / "reference").glob("*/*/*_events.csv"))
VARIANTS = ("baseline", "dep-str-x", "dep-str-ptl")


def overlaps(events):
    return partial_overlaps(chrome_trace(events, title="one step", metadata={}))


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "transfer", "variant"),
    cover(
        (schedule, checkpoint, transfer, variant)
        for schedule in (None, *SCHEDULES)
        for checkpoint in CHECKPOINT_MODES
        for transfer in ("direct", "host")
        for variant in VARIANTS
    ),
)
def test_of_simulated_steps(schedule, checkpoint, transfer, variant):
    options = {"checkpoint": checkpoint, "transfer": transfer, "schedule": schedule}
    components = Components.from_label(variant)
    step = simulate(UNET, balance=BALANCES[4], batch_size=16, chunks=8, components=components, steps=1, **options)
    assert step.events
    assert overlaps(step.events) == []


@pytest.mark.parametrize("table", TABLES, ids=lambda path: f"{path.parts[-3]} {path.parts[-2]}")
def test_of_the_stored_steps(table):
    def run(record):
        return record.evidence, record.cell, record.variant, record.repeat

    runs = [list(group) for _, group in groupby(sorted(read_events(table), key=run), run)]
    assert runs
    assert [run(group[0]) for group in runs if overlaps([record.event for record in group])] == []


def test_stored_steps_are_of_every_kind():
    assert {path.parts[-3] for path in TABLES} == {"simulated", "emulated", "measured"}


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_of_steps_measured_on_the_cpu(schedule):
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    devices = ["cpu"] * (2 if schedule in TWO_PER_DEVICE else 4)
    pipe = GPipe(layers, [1] * 4, devices=devices, chunks=4, schedule=schedule, workers="always")
    recorder = Recorder()
    with pipe.observe(recorder):
        pipe.step(torch.ones(8, 8), torch.zeros(8, 8), torch.nn.functional.mse_loss)
    assert overlaps(recorder.events()) == []
